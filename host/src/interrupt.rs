//! Ctrl-C as a flag that long work polls, so that it ends cleanly.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// From now on SIGINT, SIGTERM and SIGHUP set the flag; a second one ends the process at once.
pub fn install() {
    INSTALL.call_once(|| {
        let handler = || {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        };
        if let Err(e) = ctrlc::set_handler(handler) {
            tracing::warn!("no handler for Ctrl-C: {e}");
        }
    });
}

/// Whether the user asked to stop; from now on he has not.
pub fn take() -> bool {
    REQUESTED.swap(false, Ordering::Relaxed)
}

/// Whether the user asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
