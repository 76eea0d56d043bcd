//! Files that are written whole, or stay as they were.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Where `path`, or what it links to, is: the file and its directory.
fn place(path: &Path) -> io::Result<(PathBuf, PathBuf)> {
    // A device or a folder would be replaced, or could not be.
    if path.exists() && !path.is_file() {
        return Err(io::Error::other("it is there and is not a file"));
    }
    let path = std::fs::canonicalize(path).unwrap_or(path.into());
    let directory = match path.parent() {
        Some(p) if p != Path::new("") => p.into(),
        _ => ".".into(),
    };
    Ok((path, directory))
}

/// Whether a file can be made there; it leaves none.
pub fn check(path: &Path) -> io::Result<()> {
    tempfile::tempfile_in(place(path)?.1).map(drop)
}

/// Writes what `fill` gives to `path`, or to the file that it links to, by way of one beside it whose name
/// begins with `prefix`.
pub fn write(
    path: &Path,
    prefix: &str,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let (path, directory) = place(path)?;
    let file = tempfile::Builder::new()
        .prefix(prefix)
        .tempfile_in(directory)?;
    let mut out = BufWriter::new(file);
    fill(&mut out)?;
    let file = out.into_inner().map_err(|e| e.into_error())?;
    file.as_file().sync_all()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::Permissions::from_mode(0o644);
        file.as_file().set_permissions(mode)?;
    }
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_stay_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("there")).unwrap();
        std::fs::write(at("there/file"), "old").unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink("there/file", at("link")).unwrap();
        #[cfg(not(unix))]
        return;
        check(&at("link")).unwrap();
        write(&at("link"), ".x-", |out| out.write_all(b"new")).unwrap();
        assert!(at("link").is_symlink());
        assert_eq!(std::fs::read(at("there/file")).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(at("there")).unwrap().count(), 1);
        // One that leads nowhere is replaced.
        #[cfg(unix)]
        std::os::unix::fs::symlink("nowhere/file", at("lost")).unwrap();
        write(&at("lost"), ".x-", |out| out.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read(at("lost")).unwrap(), b"new");
        assert!(check(&at("there")).is_err() && check(&at("none/file")).is_err());
    }
}
