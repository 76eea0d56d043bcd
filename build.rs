//! Build script of `host`.
fn main() {}
