//! The command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    host::cli::main()
}
