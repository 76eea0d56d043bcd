//! Makes the PTX that the repository keeps, `gpu/ptx`. Run through `tools/ptx.sh`.

use cuda_builder::{CudaBuilderError, PtxSet};
use std::path::Path;
use std::process::ExitCode;

fn run() -> Result<(), CudaBuilderError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).unwrap_or(here);
    let set = PtxSet::of_workspace(root);
    let compiler = set.compiler()?;
    eprintln!("{} ({})", compiler.version(), compiler.rustc().display());
    if std::env::args().nth(1).as_deref() == Some("--find") {
        println!("{}", compiler.rustc().display());
        return Ok(());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| root.join("target"), Into::into);
    set.build(&compiler, &set.folder, &target.join("cuda_builder"))?;
    for &arch in &set.archs {
        eprintln!("{}", set.file(&set.folder, arch).display());
    }
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
