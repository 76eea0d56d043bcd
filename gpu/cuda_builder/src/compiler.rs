//! Finding a compiler for nvptx64.

use crate::CudaBuilderError;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable that names the rustc to use, instead of looking for one.
const OVERRIDE: &str = "ANSATZ_NVPTX_RUSTC";

/// Oldest compiler that builds the device crates.
const OLDEST: (u32, u32) = (1, 95);

/// A Rust compiler that can build for nvptx64: rustc with the NVPTX back end, the sources of `core`,
/// and its cargo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    rustc: PathBuf,
    cargo: PathBuf,
    version: String,
}

impl Compiler {
    /// Looks, in this order, at `ANSATZ_NVPTX_RUSTC`, where set; the toolchains of rustup, nightly ones
    /// first; `/usr/bin/rustc`, as distributions install it.
    ///
    /// # Errors
    /// [`CudaBuilderError::NoCompiler`], with what each place lacks.
    pub fn find() -> Result<Self, CudaBuilderError> {
        Self::find_preferring(None)
    }

    /// As [`find`](Self::find), but where one of them is of this version (a `rustc --version` line), that
    /// one: it makes the PTX that was made with it again.
    ///
    /// # Errors
    /// [`CudaBuilderError::NoCompiler`], with what each place lacks.
    pub fn find_preferring(version: Option<&str>) -> Result<Self, CudaBuilderError> {
        let places = match std::env::var_os(OVERRIDE) {
            Some(rustc) => vec![PathBuf::from(rustc)],
            None => {
                let mut places = rustup_toolchains();
                places.push("/usr/bin/rustc".into());
                places
            }
        };
        choose(&places, version)
    }

    /// The compiler at a path, or what it lacks.
    ///
    /// # Errors
    /// What is missing, in words.
    pub fn at(rustc: &Path) -> Result<Self, String> {
        if !rustc.is_file() {
            return Err("not there".into());
        }
        let ask = |arguments: &[&str]| {
            let mut command = Command::new(rustc);
            command
                .env_remove("RUSTUP_TOOLCHAIN")
                .env("RUSTC_BOOTSTRAP", "1")
                .args(arguments);
            let output = command.output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                return Err(format!("`rustc {}` fails", arguments.join(" ")));
            }
            String::from_utf8(output.stdout).map_err(|error| error.to_string())
        };
        let version = ask(&["--version"])?.trim().to_owned();
        let number = release(&version).ok_or_else(|| format!("`{version}` is no version"))?;
        if number < OLDEST {
            return Err(format!("{version} is older than {}.{}", OLDEST.0, OLDEST.1));
        }
        let sysroot = PathBuf::from(ask(&["--print=sysroot"])?.trim());
        if !sysroot
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .is_file()
        {
            return Err(format!("{version} has no rust-src"));
        }
        let processors = ask(&["--print=target-cpus", "--target=nvptx64-nvidia-cuda"])?;
        if !processors.contains("sm_90") {
            return Err(format!("{version} has no NVPTX back end"));
        }
        let cargo = rustc.with_file_name("cargo");
        if !cargo.is_file() {
            return Err(format!("no {}", cargo.display()));
        }
        Ok(Self {
            rustc: rustc.to_owned(),
            cargo,
            version,
        })
    }

    /// The compiler.
    #[must_use]
    pub fn rustc(&self) -> &Path {
        &self.rustc
    }

    /// Its cargo.
    #[must_use]
    pub fn cargo(&self) -> &Path {
        &self.cargo
    }

    /// What `rustc --version` prints.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }
}

/// The first compiler of that version, else the first.
fn choose(places: &[PathBuf], version: Option<&str>) -> Result<Compiler, CudaBuilderError> {
    let mut looked = Vec::new();
    let mut first = None;
    for rustc in places {
        match Compiler::at(rustc) {
            Ok(compiler) if version.is_none_or(|version| version == compiler.version) => {
                return Ok(compiler);
            }
            Ok(compiler) => {
                first.get_or_insert(compiler);
            }
            Err(lacks) => looked.push(format!("  {}: {lacks}", rustc.display())),
        }
    }
    let looked = looked.join("\n");
    first.ok_or(CudaBuilderError::NoCompiler { looked })
}

/// Major and minor number of a `rustc --version` line.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version
        .strip_prefix("rustc ")?
        .split(['.', '-', ' '])
        .map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The compilers of rustup's toolchains, nightly ones first, then by name, latest first.
fn rustup_toolchains() -> Vec<PathBuf> {
    let home = std::env::var_os("RUSTUP_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".rustup")));
    let Some(entries) = home.and_then(|home| std::fs::read_dir(home.join("toolchains")).ok())
    else {
        return Vec::new();
    };
    let mut toolchains: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    toolchains.sort_by_key(|path| {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        std::cmp::Reverse((name.starts_with("nightly"), name))
    });
    toolchains
        .into_iter()
        .map(|toolchain| toolchain.join("bin/rustc"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(
            release("rustc 1.96.0 (ac68faa20 2026-05-25)"),
            Some((1, 96))
        );
        assert_eq!(
            release("rustc 1.97.0-nightly (e50aa6fba 2026-05-19)"),
            Some((1, 97))
        );
        assert_eq!(release("clang 17"), None);
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(
            Compiler::at(Path::new("/nonexistent/rustc")),
            Err("not there".into())
        );
        let folder = tempfile::tempdir().unwrap();
        let rustc = folder.path().join("rustc");
        let script = |text: &str| {
            use std::os::unix::fs::PermissionsExt;
            // Written elsewhere and moved: a file open for writing cannot be run.
            let new = folder.path().join("new");
            std::fs::write(&new, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::rename(&new, &rustc).unwrap();
            Compiler::at(&rustc)
        };
        assert_eq!(script("exit 1"), Err("`rustc --version` fails".into()));
        assert!(
            script("echo rustc 1.60.0")
                .unwrap_err()
                .contains("older than 1.95")
        );
        let sysroot = folder.path().display();
        let answer = |cpus: &str| {
            format!(
                "case $1 in --version) echo rustc 1.99.0;; --print=sysroot) echo {sysroot};; *) echo {cpus};; esac"
            )
        };
        assert_eq!(
            script(&answer("sm_90")),
            Err("rustc 1.99.0 has no rust-src".into())
        );
        let core = folder.path().join("lib/rustlib/src/rust/library/core");
        std::fs::create_dir_all(&core).unwrap();
        std::fs::write(core.join("Cargo.toml"), "").unwrap();
        assert_eq!(
            script(&answer("none")),
            Err("rustc 1.99.0 has no NVPTX back end".into())
        );
        assert!(script(&answer("sm_90")).unwrap_err().contains("cargo"));
        std::fs::write(folder.path().join("cargo"), "").unwrap();
        assert_eq!(script(&answer("sm_90")).unwrap().version(), "rustc 1.99.0");

        // Another one, newer: the first counts unless a version is wished for.
        let other = folder.path().join("bin");
        std::fs::create_dir(&other).unwrap();
        std::fs::copy(folder.path().join("cargo"), other.join("cargo")).unwrap();
        script(&answer("sm_90").replace("1.99.0", "1.100.0")).unwrap();
        std::fs::rename(&rustc, other.join("rustc")).unwrap();
        script(&answer("sm_90")).unwrap();
        let places = ["none", "rustc", "bin/rustc"].map(|place| folder.path().join(place));
        for (wish, expected) in [
            (None, "rustc 1.99.0"),
            (Some("rustc 1.100.0"), "rustc 1.100.0"),
            (Some("rustc 1.98.0"), "rustc 1.99.0"),
        ] {
            assert_eq!(choose(&places, wish).unwrap().version(), expected);
        }
        let error = choose(&places[..1], None).unwrap_err().to_string();
        assert!(
            error.contains("none: not there") && error.contains("rustup toolchain"),
            "{error}"
        );
    }
}
