//! PTX files kept in a repository, and the record of what they were made from.

use crate::{Arch, Compiler, CudaBuilder, CudaBuilderError, write_if_changed};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Name of the record in the folder of the PTX files.
const RECORD: &str = "SOURCES.blake3";

/// A crate, the architectures it is built for, and the folder where its PTX files are kept: one
/// `CRATE_ARCH.ptx` each, and `SOURCES.blake3`, which holds the hashes of the sources and of the files
/// and the version of the compiler.
#[derive(Clone, Debug)]
pub struct PtxSet {
    /// Folder of the crate.
    pub crate_path: PathBuf,
    /// Architectures to build for.
    pub archs: Vec<Arch>,
    /// Folder of the PTX files.
    pub folder: PathBuf,
    /// Files and folders that the PTX is made from, relative to [`root`](Self::root). In folders every
    /// `.rs` and `.toml` file counts, those in folders named `tests`, `examples` or `emulator` apart.
    pub sources: Vec<PathBuf>,
    /// What the sources are relative to.
    pub root: PathBuf,
}

/// What the files in the folder are to the sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PtxState {
    /// Made from these sources.
    Current,
    /// Not, for this reason.
    Stale(String),
}

impl PtxSet {
    /// The set of the workspace in the folder `root`: the crate `gpu`, for each of [`Arch`], kept in
    /// `gpu/ptx`.
    #[must_use]
    pub fn of_workspace(root: &Path) -> Self {
        let sources = [
            "gpu/Cargo.toml",
            "gpu/src",
            "gpu/cuda_std/Cargo.toml",
            "gpu/cuda_std/src",
            "gpu/cuda_std/macros",
            "gpu/cuda_builder/src/lib.rs",
            "gpu/cuda_builder/src/ptx.rs",
        ];
        Self {
            crate_path: root.join("gpu"),
            archs: vec![Arch::Sm80, Arch::Sm90],
            folder: root.join("gpu/ptx"),
            sources: sources.map(PathBuf::from).to_vec(),
            root: root.to_owned(),
        }
    }

    /// Name of the crate's folder, which begins the files' names.
    fn name(&self) -> String {
        self.crate_path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// The compiler that the files in the folder were made with, where it is on this machine, else
    /// another one.
    ///
    /// # Errors
    /// [`CudaBuilderError::NoCompiler`].
    pub fn compiler(&self) -> Result<Compiler, CudaBuilderError> {
        let record = std::fs::read_to_string(self.folder.join(RECORD)).unwrap_or_default();
        Compiler::find_preferring(
            record
                .lines()
                .find_map(|line| line.strip_prefix("compiler ")),
        )
    }

    /// The PTX file of an architecture, in a folder.
    #[must_use]
    pub fn file(&self, folder: &Path, arch: Arch) -> PathBuf {
        folder.join(format!("{}_{}.ptx", self.name(), arch.name()))
    }

    /// The sources, sorted.
    ///
    /// # Errors
    /// [`CudaBuilderError::Io`].
    pub fn source_files(&self) -> Result<Vec<PathBuf>, CudaBuilderError> {
        let mut files = Vec::new();
        for source in &self.sources {
            collect(&self.root.join(source), &mut files)?;
        }
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// Hash of the sources: BLAKE3 over, for each file in order, the hashes of its path from the root
    /// (with `/`) and of its content.
    ///
    /// # Errors
    /// [`CudaBuilderError::Io`].
    pub fn source_hash(&self) -> Result<String, CudaBuilderError> {
        let mut hasher = blake3::Hasher::new();
        for file in self.source_files()? {
            let content = std::fs::read(&file).map_err(CudaBuilderError::io(&file))?;
            let path = file.strip_prefix(&self.root).unwrap_or(&file);
            let path = path.to_string_lossy().replace('\\', "/");
            hasher.update(blake3::hash(path.as_bytes()).as_bytes());
            hasher.update(blake3::hash(&content).as_bytes());
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// Compares the files in the folder with the sources.
    ///
    /// # Errors
    /// [`CudaBuilderError::Io`] where a source cannot be read; a PTX file that cannot is stale.
    pub fn state(&self) -> Result<PtxState, CudaBuilderError> {
        let stale = |why: String| Ok(PtxState::Stale(why));
        let record = self.folder.join(RECORD);
        let Ok(text) = std::fs::read_to_string(&record) else {
            return stale(format!("{} is missing", record.display()));
        };
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        };
        if field("sources") != Some(&self.source_hash()?) {
            return stale(format!("{} is of other sources", record.display()));
        }
        for &arch in &self.archs {
            let file = self.file(&self.folder, arch);
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let Ok(content) = std::fs::read(&file) else {
                return stale(format!("{} is missing", file.display()));
            };
            if field(&name) != Some(blake3::hash(&content).to_hex().as_str()) {
                return stale(format!("{} was changed since it was made", file.display()));
            }
        }
        Ok(PtxState::Current)
    }

    /// Builds all files into `folder`, with the record.
    ///
    /// # Errors
    /// [`CudaBuilderError`].
    pub fn build(
        &self,
        compiler: &Compiler,
        folder: &Path,
        target_dir: &Path,
    ) -> Result<(), CudaBuilderError> {
        let mut record = format!(
            "# What the PTX in this folder was made from. Written by tools/ptx.sh; see gpu/cuda_builder/README.md.\n\
             sources {}\ncompiler {}\n",
            self.source_hash()?,
            compiler.version()
        );
        for &arch in &self.archs {
            let file = self.file(folder, arch);
            let builder = CudaBuilder::new(&self.crate_path).arch(arch).copy_to(&file);
            builder
                .compiler(compiler.clone())
                .target_dir(target_dir)
                .build()?;
            let content = std::fs::read(&file).map_err(CudaBuilderError::io(&file))?;
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            // Writing to a String cannot fail.
            let _ = writeln!(record, "{name} {}", blake3::hash(&content).to_hex());
        }
        write_if_changed(&folder.join(RECORD), &record)
    }
}

/// Adds a file, or the sources in a folder.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), CudaBuilderError> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in std::fs::read_dir(path).map_err(CudaBuilderError::io(path))? {
        let path = entry.map_err(CudaBuilderError::io(path))?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let extension = path.extension().unwrap_or_default();
        if path.is_dir() {
            if !matches!(name.as_str(), "tests" | "examples" | "emulator" | "target") {
                collect(&path, files)?;
            }
        } else if extension == "rs" || extension == "toml" {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_change_of_a_source_or_a_file_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("k/Cargo.toml", "[package]");
        put("k/src/lib.rs", "a");
        put("k/src/b/c.rs", "b");
        let set = PtxSet {
            crate_path: root.join("k"),
            archs: vec![Arch::Sm80, Arch::Sm90],
            folder: root.join("ptx"),
            sources: vec!["k/src".into(), "k/Cargo.toml".into()],
            root: root.clone(),
        };
        let stale = |part: &str| match set.state().unwrap() {
            PtxState::Stale(why) => assert!(why.contains(part), "{why}"),
            PtxState::Current => panic!("not stale"),
        };
        assert_eq!(set.source_files().unwrap().len(), 3);
        stale("SOURCES.blake3 is missing");
        let record = |set: &PtxSet| {
            let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex();
            let sources = set.source_hash().unwrap();
            format!(
                "sources {sources}\nk_sm_80.ptx {}\nk_sm_90.ptx {}\n",
                hash("80"),
                hash("90")
            )
        };
        put("ptx/SOURCES.blake3", &record(&set));
        stale("k_sm_80.ptx is missing");
        put("ptx/k_sm_80.ptx", "80");
        put("ptx/k_sm_90.ptx", "90 edited");
        stale("k_sm_90.ptx was changed");
        put("ptx/k_sm_90.ptx", "90");
        assert_eq!(set.state().unwrap(), PtxState::Current);
        put("k/src/emulator/mod.rs", "not in the PTX");
        put("k/src/notes.md", "nor this");
        assert_eq!(set.state().unwrap(), PtxState::Current);
        put("k/src/b/c.rs", "B");
        stale("other sources");
        put("k/src/b/c.rs", "b");
        assert_eq!(set.state().unwrap(), PtxState::Current);
        std::fs::rename(root.join("k/src/b/c.rs"), root.join("k/src/b/d.rs")).unwrap();
        stale("other sources");
    }
}
