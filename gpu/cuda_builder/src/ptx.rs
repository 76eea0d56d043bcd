//! Finishing the PTX that the compiler emits.
//!
//! The compiler emits one module of a crate: every public function, kernel or not, with mangled names,
//! and what it cannot express left by `cuda_std` as comments. This keeps what the kernels reach and
//! writes it in an order and with names that depend on the source alone.

use crate::{Arch, CudaBuilderError};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Start of `cuda_std::launch_bounds`' comment: most threads a block, least blocks a multiprocessor.
const BOUNDS: &str = "// cuda_std.bounds ";
/// Start of the comment of `cuda_std::shared_array`: suffix of the symbol, bytes.
const SHARED: &str = "// cuda_std.shared ";
/// `cuda_std::grid`: from sm_90 on; launches do not overlap elsewhere, where it has nothing to do.
const GRID: &str = "griddepcontrol.";
/// `cuda_std::barrier`: waits that suspend, from sm_90 on, and those that do not.
const WAITS: [&str; 2] = ["mbarrier.try_wait.", "mbarrier.test_wait."];
/// The launch's dynamic shared memory.
const DYNAMIC: &str = "__cuda_std_dynamic_shared";

/// A function, kernel or variable of the module.
struct Item<'a> {
    name: &'a str,
    kind: Kind,
    /// Line of the compiler's output, from 1.
    line: usize,
    /// Without comments and empty lines.
    lines: Vec<&'a str>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Kernel,
    Function,
    /// A forward declaration of a function that the module defines.
    Declaration,
    External,
    Variable,
}

/// The identifiers of a line.
fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !is_identifier(c))
        .filter(|word| !word.is_empty())
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

/// Finishes a module.
pub(crate) fn finish(text: &str, arch: Arch) -> Result<String, CudaBuilderError> {
    let malformed = |line: usize, what: &str| CudaBuilderError::Malformed {
        line,
        what: what.to_owned(),
    };
    let mut version = None;
    let mut items = Vec::new();
    let mut lines = text
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim_end()))
        .peekable();
    while let Some((number, line)) = lines.next() {
        if line.is_empty() || line.trim_start().starts_with("//") {
            continue;
        }
        if let Some(found) = line.strip_prefix(".version ") {
            let parts = found
                .split_once('.')
                .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            version = Some(parts.ok_or_else(|| malformed(number, "no version"))?);
            continue;
        }
        if let Some(target) = line.strip_prefix(".target ") {
            if target.split(',').next() != Some(arch.name()) {
                return Err(malformed(
                    number,
                    &format!("target {target}, expected {}", arch.name()),
                ));
            }
            continue;
        }
        if line.starts_with(".address_size ") {
            continue;
        }
        let mut item = vec![line];
        let mut open = false;
        while if open {
            item.last() != Some(&"}")
        } else {
            !item.last().is_some_and(|line| line.ends_with(';'))
        } {
            let (_, line) = lines
                .next()
                .ok_or_else(|| malformed(number, "unfinished item"))?;
            open |= line == "{";
            let comment = line.trim_start().starts_with("//");
            let ours = [BOUNDS, SHARED]
                .iter()
                .any(|marker| line.trim_start().starts_with(marker));
            let lacking = arch < Arch::Sm90 && line.trim_start().starts_with(GRID);
            if !line.is_empty() && (!comment || ours) && !lacking {
                item.push(line);
            }
        }
        items.push(parse_item(item, number)?);
    }
    let version = version
        .ok_or_else(|| malformed(1, "no .version"))?
        .max(arch.ptx_version());
    let kept = reach(&items)?;
    write(&items, &kept, version, arch)
}

fn parse_item(lines: Vec<&str>, line: usize) -> Result<Item<'_>, CudaBuilderError> {
    let what = || CudaBuilderError::Malformed {
        line,
        what: lines[0].to_owned(),
    };
    let head = lines[0];
    let (kind, name) = if let Some((_, rest)) = head.split_once(".entry ") {
        (Kind::Kernel, rest.split('(').next())
    } else if let Some((_, rest)) = head.split_once(".func ") {
        let rest = rest.trim_start();
        // After the result's parameter, where there is one.
        let rest = if rest.starts_with('(') {
            rest.split_once(')').ok_or_else(what)?.1
        } else {
            rest
        };
        let declared = lines.last().is_some_and(|line| line.ends_with(';'));
        let kind = match declared {
            true if head.starts_with(".extern") => Kind::External,
            true => Kind::Declaration,
            false => Kind::Function,
        };
        (kind, rest.split(['(', ';']).next())
    } else if [".global", ".const", ".shared", ".visible", ".extern"]
        .iter()
        .any(|d| head.starts_with(d))
    {
        let declarator = head.split(['[', '=', ';']).next();
        (
            Kind::Variable,
            declarator.and_then(|text| text.split_whitespace().last()),
        )
    } else {
        return Err(what());
    };
    let name = name
        .map(str::trim)
        .filter(|name| !name.is_empty() && name.chars().all(is_identifier));
    let name = name.ok_or_else(what)?;
    Ok(Item {
        name,
        kind,
        line,
        lines,
    })
}

/// The items that kernels reach, kernels included.
fn reach(items: &[Item<'_>]) -> Result<BTreeSet<usize>, CudaBuilderError> {
    let defined: BTreeMap<&str, usize> = {
        let definitions = items
            .iter()
            .enumerate()
            .filter(|(_, item)| item.kind != Kind::Declaration);
        definitions.map(|(i, item)| (item.name, i)).collect()
    };
    let mut kept = BTreeSet::new();
    for (start, kernel) in items
        .iter()
        .enumerate()
        .filter(|(_, item)| item.kind == Kind::Kernel)
    {
        // Depth first, with the path for the error.
        let mut from = BTreeMap::from([(start, start)]);
        let mut stack = vec![start];
        while let Some(i) = stack.pop() {
            if items[i].kind == Kind::External {
                let mut path = vec![items[i].name];
                let mut at = i;
                while at != start {
                    at = from[&at];
                    path.push(items[at].name);
                }
                path.reverse();
                return Err(CudaBuilderError::Undefined {
                    kernel: kernel.name.to_owned(),
                    symbol: items[i].name.to_owned(),
                    path: path.join(" -> "),
                });
            }
            kept.insert(i);
            for word in items[i].lines.iter().flat_map(|line| identifiers(line)) {
                if let Some(&next) = defined.get(word)
                    && !from.contains_key(&next)
                {
                    from.insert(next, i);
                    stack.push(next);
                }
            }
        }
    }
    for (i, item) in items.iter().enumerate() {
        if item.kind == Kind::Declaration
            && defined.get(item.name).is_some_and(|at| kept.contains(at))
        {
            kept.insert(i);
        }
    }
    Ok(kept)
}

fn write(
    items: &[Item<'_>],
    kept: &BTreeSet<usize>,
    (major, minor): (u32, u32),
    arch: Arch,
) -> Result<String, CudaBuilderError> {
    // Mangled names carry a hash of the machine's paths and the compiler: number them instead.
    let mut names: BTreeMap<&str, String> = BTreeMap::new();
    for item in kept.iter().map(|&i| &items[i]) {
        let next = names.len();
        match item.kind {
            Kind::Function | Kind::Declaration => {
                names
                    .entry(item.name)
                    .or_insert_with(|| format!("function_{next}"));
            }
            Kind::Variable if item.name != DYNAMIC => {
                names
                    .entry(item.name)
                    .or_insert_with(|| format!("constant_{next}"));
            }
            _ => {}
        }
    }

    let mut body = String::new();
    let mut shared = BTreeMap::new();
    let mut dynamic = false;
    for item in kept.iter().map(|&i| &items[i]) {
        let malformed = |what: String| CudaBuilderError::Malformed {
            line: item.line,
            what,
        };
        let mut bounds = None;
        for line in &item.lines {
            let marker = line.trim_start();
            if let Some(numbers) = marker.strip_prefix(BOUNDS) {
                let numbers: Option<Vec<u32>> =
                    numbers.split(' ').map(|n| n.parse().ok()).collect();
                match numbers.as_deref() {
                    Some(&[threads, blocks]) => bounds = Some((threads, blocks)),
                    _ => return Err(malformed(marker.to_owned())),
                }
            } else if let Some(array) = marker.strip_prefix(SHARED) {
                let parts = array
                    .split_once(' ')
                    .and_then(|(name, bytes)| Some((name, bytes.parse::<u32>().ok()?)));
                let (name, bytes) = parts.ok_or_else(|| malformed(marker.to_owned()))?;
                shared.insert(name, bytes);
            }
            dynamic |= identifiers(line).any(|word| word == DYNAMIC);
        }
        body.push('\n');
        for line in &item.lines {
            if line.trim_start().starts_with("//") {
                continue;
            }
            if *line == "{"
                && let (Kind::Kernel, Some((threads, blocks))) = (item.kind, bounds)
            {
                for (directive, value) in [(".maxntid", threads), (".minnctapersm", blocks)] {
                    if value > 0 {
                        // Writing to a String cannot fail, here and below.
                        let _ = writeln!(body, "{directive} {value}");
                    }
                }
            }
            let waits;
            let line = if arch < Arch::Sm90 && line.contains(WAITS[0]) {
                waits = line.replace(WAITS[0], WAITS[1]);
                waits.as_str()
            } else {
                line
            };
            rename(line, &names, &mut body);
            body.push('\n');
        }
    }

    let mut text = format!(
        "// Made by cuda_builder from the sources; not to be edited.\n.version {major}.{minor}\n.target {}\n\
         .address_size 64\n",
        arch.name()
    );
    if dynamic {
        let _ = writeln!(text, "\n.extern .shared .align 128 .b8 {DYNAMIC}[];");
    }
    for (name, bytes) in shared {
        let _ = writeln!(
            text,
            "\n.shared .align 16 .b8 __cuda_std_shared_{name}[{bytes}];"
        );
    }
    Ok(text + &body)
}

/// Appends a line with its names replaced, those of a function's parameters with their function's.
fn rename(line: &str, names: &BTreeMap<&str, String>, out: &mut String) {
    let mut rest = line;
    while let Some(start) = rest.find(is_identifier) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = rest.find(|c| !is_identifier(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let (base, parameter) = word
            .rfind("_param_")
            .map_or((word, ""), |at| word.split_at(at));
        match (names.get(word), names.get(base)) {
            (Some(name), _) => out.push_str(name),
            (None, Some(name)) => {
                out.push_str(name);
                out.push_str(parameter);
            }
            (None, None) => out.push_str(word),
        }
        rest = after;
    }
    out.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "//
// Generated by LLVM NVPTX Back-End
//

.version 7.0
.target sm_80
.address_size 64

	// .globl	_RNvCsAbc_3gpu4host
.extern .func _RNvCsXyz_4core5panic
(
	.param .b64 _RNvCsXyz_4core5panic_param_0
)
;
.func  (.param .b32 func_retval0) _RNvCsAbc_3gpu6helper
(
	.param .b32 _RNvCsAbc_3gpu6helper_param_0
)
;
.global .align 4 .b8 anon_$_0123abcd_$_0[8] = {1, 0, 0, 0, 2};
.global .align 4 .b8 unused[4];

.visible .func _RNvCsAbc_3gpu4host(
	.param .b64 _RNvCsAbc_3gpu4host_param_0
)
{
	.reg .b64 	%rd<2>;
	call.uni _RNvCsXyz_4core5panic, (%rd1);
	ret;

}
.visible .entry kernel(
	.param .align 8 .b8 kernel_param_0[16]
)
{
	.reg .b32 	%r<9>;

	// begin inline asm
	// cuda_std.bounds 256 3
	// end inline asm
	// begin inline asm
	// cuda_std.shared 77_32 32
mov.u32 %r5, __cuda_std_shared_77_32;
	// end inline asm
	mov.u32 %r6, __cuda_std_dynamic_shared;
	{ // callseq 0, 0
	call.uni (retval0), _RNvCsAbc_3gpu6helper, (param0);
	} // callseq 0
	ret;

}
	// .globl	_RNvCsAbc_3gpu6helper
.func  (.param .b32 func_retval0) _RNvCsAbc_3gpu6helper(
	.param .b32 _RNvCsAbc_3gpu6helper_param_0
)
{
	ld.param.b32 	%r1, [_RNvCsAbc_3gpu6helper_param_0];
	ld.global.u32 	%r2, [anon_$_0123abcd_$_0+4];
	ret;

}
";

    #[test]
    fn keeps_what_kernels_reach_under_stable_names() {
        let expected = "// Made by cuda_builder from the sources; not to be edited.
.version 7.4
.target sm_80
.address_size 64

.extern .shared .align 128 .b8 __cuda_std_dynamic_shared[];

.shared .align 16 .b8 __cuda_std_shared_77_32[32];

.func  (.param .b32 func_retval0) function_0
(
	.param .b32 function_0_param_0
)
;

.global .align 4 .b8 constant_1[8] = {1, 0, 0, 0, 2};

.visible .entry kernel(
	.param .align 8 .b8 kernel_param_0[16]
)
.maxntid 256
.minnctapersm 3
{
	.reg .b32 	%r<9>;
mov.u32 %r5, __cuda_std_shared_77_32;
	mov.u32 %r6, __cuda_std_dynamic_shared;
	{ // callseq 0, 0
	call.uni (retval0), function_0, (param0);
	} // callseq 0
	ret;
}

.func  (.param .b32 func_retval0) function_0(
	.param .b32 function_0_param_0
)
{
	ld.param.b32 	%r1, [function_0_param_0];
	ld.global.u32 	%r2, [constant_1+4];
	ret;
}
";
        assert_eq!(finish(MODULE, Arch::Sm80).unwrap(), expected);
        // Another machine's hashes give the same.
        let other = MODULE
            .replace("CsAbc_", "CsQrs9_")
            .replace("0123abcd", "99");
        assert_eq!(finish(&other, Arch::Sm80).unwrap(), expected);
        let newer = MODULE.replace(".version 7.0", ".version 8.7");
        assert!(
            finish(&newer, Arch::Sm80)
                .unwrap()
                .contains(".version 8.7\n")
        );
    }

    #[test]
    fn a_panic_that_a_kernel_reaches_is_named() {
        let text = MODULE.replace(
            "	ld.global.u32 	%r2",
            "	call.uni _RNvCsXyz_4core5panic, (%rd1);\n	ld.global.u32 	%r2",
        );
        let error = finish(&text, Arch::Sm80).unwrap_err();
        let CudaBuilderError::Undefined {
            kernel,
            symbol,
            path,
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (kernel.as_str(), symbol.as_str()),
            ("kernel", "_RNvCsXyz_4core5panic")
        );
        assert_eq!(
            path,
            "kernel -> _RNvCsAbc_3gpu6helper -> _RNvCsXyz_4core5panic"
        );
    }

    #[test]
    fn other_forms_are_refused() {
        for (from, to) in [
            (".target sm_80", ".target sm_70"),
            (".version 7.0", ".version x"),
            (".version 7.0\n", ""),
            (".visible .entry kernel(", ".weird kernel("),
            ("cuda_std.bounds 256 3", "cuda_std.bounds 256"),
            ("cuda_std.shared 77_32 32", "cuda_std.shared 77_32"),
            (
                "[anon_$_0123abcd_$_0+4];\n	ret;\n\n}",
                "[anon_$_0123abcd_$_0+4];",
            ),
        ] {
            assert!(MODULE.contains(from), "{from}");
            let error = finish(&MODULE.replace(from, to), Arch::Sm80).unwrap_err();
            assert!(
                matches!(error, CudaBuilderError::Malformed { .. }),
                "{from} -> {to}: {error}"
            );
        }
    }
}
