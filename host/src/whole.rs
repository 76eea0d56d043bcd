//! Files that are written whole, or stay as they were.

use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes what `fill` gives to `path`, by way of a file beside it whose name begins with `prefix`.
pub fn write(
    path: &Path,
    prefix: &str,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    if path.exists() && !path.is_file() {
        return Err(io::Error::other("it is there and is not a file"));
    }
    let dir = match path.parent() {
        Some(p) if p != Path::new("") => p,
        _ => Path::new("."),
    };
    let file = tempfile::Builder::new().prefix(prefix).tempfile_in(dir)?;
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
