//! Build script of `host`: finds the PTX that goes into it.
//!
//! The PTX kept in `gpu/ptx` is used where it was made from these sources. Where it was not, it is
//! made anew with a compiler for nvptx64, into the build folder; where there is none, the build ends
//! with an error. Sets `ANSATZ_PTX_SM_80`, `ANSATZ_PTX_SM_90` (paths, for `include_str!`) and
//! `ANSATZ_PTX_SOURCES` (hash of the sources).

use cuda_builder::{Arch, CudaBuilderError, PtxSet, PtxState};
use std::path::PathBuf;
use std::process::ExitCode;

fn variable(name: &str) -> PathBuf {
    std::env::var_os(name)
        .map(PathBuf::from)
        .unwrap_or_else(|| panic!("cargo sets {name}"))
}

fn run() -> Result<(), String> {
    let host = variable("CARGO_MANIFEST_DIR");
    let set = PtxSet::of_workspace(host.parent().unwrap_or(&host));
    println!("cargo:rerun-if-env-changed=ANSATZ_NVPTX_RUSTC");
    for source in set
        .sources
        .iter()
        .map(|source| set.root.join(source))
        .chain([set.folder.clone()])
    {
        println!("cargo:rerun-if-changed={}", source.display());
    }

    let mut folder = set.folder.clone();
    if let PtxState::Stale(why) = set.state().map_err(|error| error.to_string())? {
        let compiler = set.compiler().map_err(|error| match error {
            CudaBuilderError::NoCompiler { .. } => format!(
                "the PTX in gpu/ptx was not made from these sources ({why}). Either restore both (git \
                 checkout gpu), or have a compiler for nvptx64 and build again.\n{error}"
            ),
            other => other.to_string(),
        })?;
        folder = variable("OUT_DIR");
        println!(
            "cargo:warning=gpu/ptx is stale ({why}): building PTX with {}",
            compiler.version()
        );
        let target = folder
            .ancestors()
            .nth(4)
            .unwrap_or(&folder)
            .join("cuda_builder");
        set.build(&compiler, &folder, &target)
            .map_err(|error| error.to_string())?;
    }
    for (arch, name) in [
        (Arch::Sm80, "ANSATZ_PTX_SM_80"),
        (Arch::Sm90, "ANSATZ_PTX_SM_90"),
    ] {
        println!(
            "cargo:rustc-env={name}={}",
            set.file(&folder, arch).display()
        );
    }
    let sources = set.source_hash().map_err(|error| error.to_string())?;
    println!("cargo:rustc-env=ANSATZ_PTX_SOURCES={sources}");
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
