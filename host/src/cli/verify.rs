//! `host verify`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::pack::Count;
use super::ui;
use crate::archive::{Archive, verify, verify_checksums};
use crate::interrupt;
use crate::model::check_archive;
use crate::model::config::Config;
use crate::model::directory::{EXPERTS_FILE, RawExperts};

#[derive(Args)]
pub struct VerifyArgs {
    /// Archive
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Model directory to compare with: its experts.safetensors or a container's shards, or the
    /// fingerprint in its dense.safetensors
    #[arg(short, long, value_name = "MODEL_DIR")]
    model: Option<PathBuf>,
    /// Checksums and structure alone, nothing decoded: as fast as the disk
    #[arg(long, conflicts_with = "model")]
    quick: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: VerifyArgs) -> anyhow::Result<()> {
    interrupt::install();
    let start = Instant::now();
    let archive = Archive::open(&args.file)?;
    let mut compared = "nothing else";
    let mut experts = None;
    if let Some(dir) = &args.model {
        if RawExperts::are_in(dir) {
            let mut config = Config::read(dir)?;
            // A layer that drafts is compared where the archive has it.
            let drafts = config.layers.len() as u32;
            config.mtp = config.nextn.is_some() && archive.layers().binary_search(&drafts).is_ok();
            experts = Some(RawExperts::open(dir, &config)?);
            compared = "the model's raw experts";
        } else {
            let stamped = check_archive(&archive, dir, &Config::read(dir)?)?;
            anyhow::ensure!(
                stamped,
                "{}: it has neither {EXPERTS_FILE} nor a fingerprint to compare with; \
                 make it with `host convert`",
                dir.display()
            );
            compared = "the model's fingerprint";
        }
    }
    let (all, verified);
    if args.quick {
        compared = "checksums";
        all = archive.records();
    } else {
        all = archive.layers().len() * archive.experts();
    }
    let count = Count::new("verifying records", all);
    if args.quick {
        verified = verify_checksums(&archive, |n| count.add(n));
    } else {
        verified = verify(&archive, experts.as_ref(), |n| count.add(n));
    }
    count.finish();
    let v = verified?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let text = json!({
            "records": v.records,
            "file_bytes": v.file_bytes,
            "raw_bytes": v.raw_bytes,
            "compared_with": compared,
            "seconds": seconds,
        });
        return Ok(ui::out(&format!("{text}\n"))?);
    }
    let what = if args.quick {
        let rate = v.file_bytes as f64 / 1e9 / seconds;
        format!("not decoded; compared with their checksums; {rate:.2} GB/s")
    } else {
        let rate = v.raw_bytes as f64 / 1e9 / seconds;
        format!(
            "whole; compared with their own digests and {compared}; {rate:.2} GB/s of raw experts"
        )
    };
    ui::note!(
        "{}: {} records, {:.2} MB, {what}",
        args.file.display(),
        v.records,
        v.file_bytes as f64 / 1e6,
    );
    Ok(())
}
