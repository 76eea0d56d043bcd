//! Reading large files: past the page cache, many pieces at once, ahead of whoever works on them.

pub mod ahead;
mod cache;
pub mod reader;
pub mod reads;
#[cfg(target_os = "linux")]
mod ring;

pub use cache::PageCache;
