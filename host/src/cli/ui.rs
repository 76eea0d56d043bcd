//! Standard output and progress.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether what stdout got last ended within a line.
static WITHIN_LINE: AtomicBool = AtomicBool::new(false);

/// Writes to stdout at once; a closed pipe is an error that `cli::main` keeps quiet about.
pub fn out(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    if !text.is_empty() {
        WITHIN_LINE.store(!text.ends_with('\n'), Ordering::Relaxed);
    }
    let written = stdout.write_all(text.as_bytes());
    written
        .and_then(|()| stdout.flush())
        .map_err(|e| io::Error::new(e.kind(), format!("standard output: {e}")))
}

/// Ends the line that stdout is in, where people see it together with stderr.
pub fn end_line() {
    if WITHIN_LINE.swap(false, Ordering::Relaxed) && io::stdout().is_terminal() {
        let _ = out("\n"); // nothing more can be done about it here
    }
}

/// Writes a line to stderr. Unlike `eprintln!` it does not panic where nobody can read it.
pub fn err(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Formats a line for stderr; see [`err`].
macro_rules! note {
    ($($arg:tt)*) => { $crate::cli::ui::err(format_args!($($arg)*)) };
}
pub(crate) use note;

/// A progress bar on stderr that shows once a second has gone by, and only on a terminal.
pub struct Progress {
    bar: ProgressBar,
    start: Instant,
    shown: bool,
}

impl Progress {
    /// Of something named `what`.
    pub fn new(what: &'static str) -> Self {
        Self::with_template(what, "{msg} {bar:30} {pos}/{len} {eta}")
    }

    /// Of bytes, with their rate and the time left.
    pub fn bytes(what: &'static str) -> Self {
        Self::with_template(
            what,
            "{msg} {bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left",
        )
    }

    fn with_template(what: &'static str, template: &str) -> Self {
        let bar = ProgressBar::hidden().with_message(what);
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.expect("a template that parses"));
        Self {
            bar,
            start: Instant::now(),
            shown: false,
        }
    }

    /// `done` of `all`.
    pub fn set(&mut self, done: usize, all: usize) {
        if !self.shown && self.start.elapsed() > Duration::from_secs(1) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
        }
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
    }

    /// Takes the bar away, for good.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }

    /// Takes the bar away.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}
