//! Builds a crate to PTX, with Rust-CUDA's [`CudaBuilder`] interface and upstream Rust's NVPTX back
//! end behind it.
//!
//! - [`Compiler::find`]: a Rust compiler on this machine that can build for nvptx64.
//! - [`CudaBuilder`]: one crate, one architecture, one PTX file.
//! - [`PtxSet`]: the PTX files that are kept in a repository, with the hash of what they were made
//!   from, so that machines without such a compiler can build the host program.
//!
//! What the compiler emits is finished by this crate (module `ptx`): functions that no kernel reaches
//! are dropped, launch bounds and shared arrays that `cuda_std` leaves as comments become directives,
//! names that depend on the machine are replaced, and a call that nothing defines (a panic, mostly) is
//! an error that names it.

mod compiler;
mod ptx;
mod set;

pub use compiler::Compiler;
pub use set::{PtxSet, PtxState};

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A target architecture: the least compute capability that the PTX runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Compute capability 8.0 (A100) and everything after it.
    Sm80,
    /// Compute capability 9.0 (H100, H200) and everything after it.
    Sm90,
}

impl Arch {
    /// As in `-C target-cpu` and `.target`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90",
        }
    }

    /// Least PTX ISA version (major, minor) of the file: what the instructions in `cuda_std` need. 7.4
    /// has `ld.global.nc.L1::no_allocate` and loads from driver 470 on; 8.0 has the bulk copies of
    /// sm_90 and loads from driver 525 on.
    #[must_use]
    pub const fn ptx_version(self) -> (u32, u32) {
        match self {
            Self::Sm80 => (7, 4),
            Self::Sm90 => (8, 0),
        }
    }
}

/// Why there is no PTX.
#[derive(Debug, thiserror::Error)]
pub enum CudaBuilderError {
    /// No compiler was found.
    #[error(
        "no Rust compiler for nvptx64-nvidia-cuda found. Looked for:\n{looked}\nInstall one: \
         `rustup toolchain install nightly --component rust-src`, or on Debian \
         `apt-get install rustc-web cargo-web rust-web-src`, or set ANSATZ_NVPTX_RUSTC to a rustc \
         with rust-src and its cargo beside it"
    )]
    NoCompiler {
        /// One line for each place looked at, with what was missing.
        looked: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The compiler reported errors.
    #[error("building {crate_path} for {arch} with {compiler} failed:\n{output}")]
    BuildFailed {
        /// The crate.
        crate_path: PathBuf,
        /// The target architecture.
        arch: &'static str,
        /// The compiler's version line.
        compiler: String,
        /// What cargo printed.
        output: String,
    },
    /// The PTX is not of the form that the compiler is known to emit.
    #[error("unexpected PTX in line {line}: {what}")]
    Malformed {
        /// Line of the compiler's output.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A kernel calls what the PTX does not define.
    #[error(
        "kernel {kernel} reaches `{symbol}`, which is not in the PTX: on the device nothing may \
         panic (no checked indexing, unwrap or division by what may be 0), and functions of other \
         crates must be generic or #[inline]. Path: {path}"
    )]
    Undefined {
        /// The kernel.
        kernel: String,
        /// The missing function.
        symbol: String,
        /// The calls from the kernel to it.
        path: String,
    },
}

impl CudaBuilderError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Builds one crate to one PTX file.
///
/// ```no_run
/// use cuda_builder::{Arch, CudaBuilder};
/// CudaBuilder::new("../gpu").arch(Arch::Sm90).copy_to("gpu_sm_90.ptx").build()?;
/// # Ok::<(), cuda_builder::CudaBuilderError>(())
/// ```
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    path: PathBuf,
    arch: Arch,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    compiler: Option<Compiler>,
}

impl CudaBuilder {
    /// A builder for the crate in the folder `path`.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_owned();
        Self {
            path,
            arch: Arch::Sm80,
            copy_to: None,
            target_dir: None,
            compiler: None,
        }
    }

    /// The target architecture; [`Arch::Sm80`] where not called.
    #[must_use]
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// Also writes the PTX to this file, where its content changes.
    #[must_use]
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> Self {
        self.copy_to = Some(path.as_ref().to_owned());
        self
    }

    /// Folder for what cargo makes on the way; `target/cuda_builder` of the crate's workspace where not
    /// called. It must not be the one of a cargo that is running.
    #[must_use]
    pub fn target_dir(mut self, path: impl AsRef<Path>) -> Self {
        self.target_dir = Some(path.as_ref().to_owned());
        self
    }

    /// The compiler; the one that [`Compiler::find`] finds where not called.
    #[must_use]
    pub fn compiler(mut self, compiler: Compiler) -> Self {
        self.compiler = Some(compiler);
        self
    }

    /// Builds, and returns the PTX file.
    ///
    /// # Errors
    /// [`CudaBuilderError`].
    pub fn build(self) -> Result<PathBuf, CudaBuilderError> {
        let compiler = match self.compiler {
            Some(compiler) => compiler,
            None => Compiler::find()?,
        };
        let manifest = self.path.join("Cargo.toml");
        let manifest = manifest
            .canonicalize()
            .map_err(CudaBuilderError::io(&manifest))?;
        let folder = manifest.parent().unwrap_or(Path::new("/"));
        let target = self
            .target_dir
            .unwrap_or_else(|| workspace(folder).join("target/cuda_builder"));
        std::fs::create_dir_all(&target).map_err(CudaBuilderError::io(&target))?;
        let target = target
            .canonicalize()
            .map_err(CudaBuilderError::io(&target))?;
        let arch = self.arch.name();
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let assembly = target.join(format!("{name}-{arch}.s"));
        let ptx = target.join(format!("{name}-{arch}.ptx"));

        let emit = format!("--emit=asm={}", assembly.display());
        let processor = format!("-Ctarget-cpu={arch}");
        let build = || {
            let mut cargo = clean_cargo(&compiler);
            cargo
                .current_dir(folder)
                .env("CARGO_TARGET_DIR", &target)
                .arg("rustc");
            if workspace(folder).join("Cargo.lock").is_file() {
                cargo.arg("--locked");
            }
            cargo.args([
                "--lib",
                "--release",
                "--target=nvptx64-nvidia-cuda",
                "-Zbuild-std=core",
                "--",
                &emit,
                &processor,
            ]);
            let output = cargo
                .output()
                .map_err(CudaBuilderError::io(compiler.cargo()))?;
            if output.status.success() {
                return Ok(());
            }
            Err(CudaBuilderError::BuildFailed {
                crate_path: folder.to_owned(),
                arch,
                compiler: compiler.version().to_owned(),
                output: String::from_utf8_lossy(&output.stderr).into_owned(),
            })
        };
        build()?;
        if !assembly.exists() {
            // Cargo takes the crate for fresh, but its assembly was deleted.
            let mut cargo = clean_cargo(&compiler);
            cargo.current_dir(folder).env("CARGO_TARGET_DIR", &target);
            cargo.args(["clean", "--release", "--target=nvptx64-nvidia-cuda"]);
            cargo
                .output()
                .map_err(CudaBuilderError::io(compiler.cargo()))?;
            build()?;
        }

        let text = std::fs::read_to_string(&assembly).map_err(CudaBuilderError::io(&assembly))?;
        let text = ptx::finish(&text, self.arch)?;
        let places = [Some(ptx), self.copy_to];
        let mut last = PathBuf::new();
        for place in places.into_iter().flatten() {
            write_if_changed(&place, &text)?;
            last = place;
        }
        Ok(last)
    }
}

/// Writes a file unless it holds that text.
pub(crate) fn write_if_changed(path: &Path, text: &str) -> Result<(), CudaBuilderError> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(CudaBuilderError::io(folder))?;
    }
    std::fs::write(path, text).map_err(CudaBuilderError::io(path))
}

/// The outermost folder above with a Cargo.toml: the workspace.
fn workspace(folder: &Path) -> &Path {
    folder
        .ancestors()
        .filter(|place| place.join("Cargo.toml").is_file())
        .last()
        .unwrap_or(folder)
}

/// The compiler's cargo, without the settings of a cargo that this may run under, and with a profile
/// that does not depend on the workspace's.
fn clean_cargo(compiler: &Compiler) -> Command {
    let mut cargo = Command::new(compiler.cargo());
    for (name, _) in std::env::vars_os() {
        if inherited_setting(&name) {
            cargo.env_remove(name);
        }
    }
    // Device features and build-std are unstable: this opens them in a released compiler.
    cargo
        .env("RUSTC", compiler.rustc())
        .env("RUSTC_BOOTSTRAP", "1");
    for (name, value) in [
        ("OPT_LEVEL", "3"),
        ("DEBUG", "false"),
        ("PANIC", "abort"),
        ("CODEGEN_UNITS", "1"),
        ("LTO", "false"),
        ("OVERFLOW_CHECKS", "false"),
        ("DEBUG_ASSERTIONS", "false"),
        ("INCREMENTAL", "false"),
    ] {
        cargo.env(format!("CARGO_PROFILE_RELEASE_{name}"), value);
    }
    cargo
}

/// Whether a variable was set by, or for, another cargo and would change this build.
fn inherited_setting(name: &OsString) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let keep = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "RUSTUP_HOME",
    ];
    let set = [
        "CARGO",
        "RUST",
        "TARGET",
        "HOST",
        "OUT_DIR",
        "PROFILE",
        "OPT_LEVEL",
        "DEBUG",
        "NUM_JOBS",
        "DEP_",
    ];
    set.iter().any(|prefix| name.starts_with(prefix))
        && !keep.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_an_outer_cargo_are_dropped() {
        for name in [
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTUP_TOOLCHAIN",
            "OUT_DIR",
            "CARGO_TARGET_DIR",
        ] {
            assert!(inherited_setting(&name.into()), "{name}");
        }
        for name in [
            "CARGO_HOME",
            "CARGO_REGISTRIES_MINE_INDEX",
            "CARGO_NET_OFFLINE",
            "PATH",
            "HOME",
            "RUSTUP_HOME",
        ] {
            assert!(!inherited_setting(&name.into()), "{name}");
        }
    }
}
