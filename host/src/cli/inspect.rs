//! `host inspect`.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;

use super::pack::Count;
use super::ui;
use crate::archive::{Archive, Inspection, LOW_NIBBLES, MatrixInfo, inspect};
use crate::interrupt;

#[derive(Args)]
pub struct InspectArgs {
    /// Archive
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Experts of each layer to decode for entropies and ratios [default: all of an archive up to
    /// 256 MB, else 4]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: InspectArgs) -> anyhow::Result<()> {
    interrupt::install();
    let archive = Archive::open(&args.file)?;
    let sample = args.sample.unwrap_or(if archive.file_len() <= 256 << 20 {
        archive.experts()
    } else {
        4
    });
    let all = archive.layers().len() * sample.clamp(1, archive.experts());
    let count = Count::new("decoding experts", all);
    let info = inspect(&archive, sample, |n| count.add(n));
    count.finish();
    let info = info?;
    let text = if args.json {
        serde_json::to_string(&info)? + "\n"
    } else {
        table(&info)?
    };
    Ok(ui::out(&text)?)
}

fn table(i: &Inspection) -> Result<String, std::fmt::Error> {
    let mut t = String::new();
    writeln!(t, "{}: version {}", i.path, i.version)?;
    writeln!(
        t,
        "experts      {} layers of {}, {} x {}, {}",
        i.layers.len(),
        i.experts,
        i.intermediate,
        i.hidden,
        i.experts_format
    )?;
    writeln!(
        t,
        "bytes        {} of {} raw: {:.4}; of packed int4 alone: {:.4}",
        i.file_bytes, i.raw_bytes, i.ratio, i.packed_ratio
    )?;
    writeln!(t, "alignment    {}", i.alignment)?;
    writeln!(t, "fingerprint  {}", i.fingerprint)?;
    for (id, table) in i.tables.iter().enumerate() {
        writeln!(
            t,
            "table {id:<6} {} symbols, {} bytes, {:.4} bits a nibble: {}",
            table.symbols,
            table.bytes,
            table.bits,
            table.users.join(", ")
        )?;
    }
    writeln!(
        t,
        "\ncoded over packed int4, beside the order-0 entropy of the nibbles ({} experts a layer)",
        i.layers.first().map_or(0, |l| l.sampled)
    )?;
    write!(t, "{:>5} {:>7}", "layer", "record")?;
    for name in ["gate_proj", "up_proj", "down_proj"] {
        write!(t, "  {name:<28}")?;
    }
    writeln!(t)?;
    for l in &i.layers {
        let half = if l.layer & LOW_NIBBLES == 0 { " " } else { "l" };
        write!(t, "{:>4}{half} {:>7.4}", l.layer & !LOW_NIBBLES, l.ratio)?;
        for m in &l.matrices {
            write!(t, "  {:<28}", cell(m))?;
        }
        writeln!(t)?;
    }
    Ok(t)
}

fn cell(m: &MatrixInfo) -> String {
    let codecs = match m.codecs.as_slice() {
        [(one, _)] => (*one).to_owned(),
        several => several
            .iter()
            .map(|(c, n)| format!("{n} {c}"))
            .collect::<Vec<_>>()
            .join(", "),
    };
    format!("{:.4} ({:.4}) {codecs}", m.ratio, m.bound)
}
