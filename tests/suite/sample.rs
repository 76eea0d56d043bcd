//! Fewer cases where each is slow (under a sanitizer): `ANSATZ_SAMPLE=n` runs every n-th.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether this case is to be passed over.
pub fn passed_over() -> bool {
    static CASE: AtomicUsize = AtomicUsize::new(0);
    let Ok(n) = std::env::var("ANSATZ_SAMPLE") else {
        return false;
    };
    let n: usize = n.parse().expect("ANSATZ_SAMPLE: a positive number");
    !CASE.fetch_add(1, Ordering::Relaxed).is_multiple_of(n)
}
