//! Models: files and forward pass.

mod cache;
pub mod check;
pub mod config;
pub mod directory;
pub mod error;
pub mod family;
pub mod format;
mod forward;
mod inventory;
mod latent;
pub(crate) mod matrix;
pub mod mtp;
mod repin;
mod routing;
mod session;
pub mod shards;
mod source;
mod step;
pub mod tensors;
mod weights;

pub use config::Config;
pub use error::ModelError;
pub(crate) use inventory::inventory;
pub use session::{CHUNK, Session, Wanted};
pub(crate) use source::bytes_to_load;
pub use source::{Source, check_archive, hex};
pub use weights::{Model, Placement};

/// Tokens of a prompt that go through a model together unless something else is asked for.
pub const BATCH: usize = 512;

/// Where a model is that nobody named: `$ANSATZ_MODEL`; else the repository's, where the program
/// was built; else `../models/sotu-row` beside the program. `None` if neither is a directory.
pub fn default_directory() -> Option<std::path::PathBuf> {
    const NAME: &str = "models/sotu-row";
    if let Some(dir) = std::env::var_os("ANSATZ_MODEL") {
        return Some(dir.into());
    }
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.join("..")));
    [Some(built), beside]
        .into_iter()
        .flatten()
        .map(|dir| dir.join(NAME))
        .find(|dir| dir.is_dir())
        .map(|dir| dir.canonicalize().unwrap_or(dir))
}
