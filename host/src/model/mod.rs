//! Models of the `glm_moe_dsa` architecture: files and forward pass.

pub mod config;
pub mod directory;
pub mod error;
mod forward;
pub mod tensors;
mod weights;

pub use config::Config;
pub use error::ModelError;
pub use forward::{CHUNK, Session, Wanted};
pub use weights::{Model, Placement, Source, hex};
