//! The command line.

fn main() {
    println!("{}", env!("CARGO_PKG_VERSION"));
}
