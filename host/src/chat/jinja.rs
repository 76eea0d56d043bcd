//! Jinja as transformers sets it up, where minijinja differs: Python's JSON, Python's texts of values,
//! methods of Python's strings, `strftime_now`, `generation` blocks.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Steps of a rendering at most, some seconds. A conversation takes a few hundred a message.
const FUEL: u64 = 50_000_000;

/// Lists within lists that are written. A namespace may hold itself.
const NESTED: usize = 200;

/// Bytes that the text of a value may have. Lists that hold one other several times double with each level.
const WRITTEN: usize = 1 << 24;

/// An environment with one template, `chat`.
pub fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_formatter(format);
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", tojson);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("string", |value: &Value| text(value));
    env.add_function("raise_exception", |what: &Value| -> Result<String, Error> {
        Err(wrong(text(what)?))
    });
    env.add_function("strftime_now", strftime_now);
    env.add_template_owned("chat", without_generation(source))?;
    Ok(env)
}

fn wrong(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Local time, as C's `strftime` writes it.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
        .map_err(|e| wrong(e.to_string()))
}

/// Blocks that say which text is the model's are the text alone: `if true` stands for `generation`.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        let put = [("generation", "if true"), ("endgeneration", "endif")]
            .into_iter()
            .find_map(|(name, put)| {
                let after = word.strip_prefix(name)?;
                let ends = after.trim_start().trim_start_matches(['-', '+']);
                ends.starts_with("%}").then_some((put, after))
            });
        rest = match put {
            None => tag,
            Some((put, after)) => {
                out.push_str(&tag[..tag.len() - word.len()]);
                out.push_str(put);
                after
            }
        };
    }
    out + rest
}

/// What `{{ value }}` puts.
fn format(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None => out.write_str(&text(value)?)?,
    }
    Ok(())
}

/// Python's `str`.
fn text(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut out = String::new();
            repr(value, 0, &mut out)?;
            Ok(out)
        }
    }
}

/// Refuses what nests too deeply, or has grown too long.
fn bounded(depth: usize, out: &str) -> Result<(), Error> {
    if depth > NESTED {
        return Err(wrong("a value that is nested too deeply to be written"));
    }
    if out.len() > WRITTEN {
        return Err(wrong("a value that is too long to be written"));
    }
    Ok(())
}

/// Of what is undefined 0.
fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(n) => Ok(n),
        None if value.is_undefined() => Ok(0),
        None => Err(wrong(format!("{} has no length", value.kind()))),
    }
}

/// Python's `repr`, which is `str` too of all but strings.
fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    bounded(depth, out)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => out.push_str(&quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string as Python writes it in a list.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out += &format!("\\x{:02x}", c as u32),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Integers in full; floats as the shortest text that reads back, with an exponent where Python has one.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    let size = x.abs();
    if !x.is_finite() {
        return (if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        })
        .into();
    }
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{x:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ('-', digits),
            None => ('+', exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    format!("{x:?}")
}

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`.
fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    args: Kwargs,
) -> Result<Value, Error> {
    let ascii = match ensure_ascii {
        Some(ascii) => ascii,
        None => args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|v| !v.is_none()) {
        None => None,
        Some(v) if v.kind() == ValueKind::String => v.as_str().map(String::from),
        Some(v) => Some(" ".repeat(usize::try_from(v)?.min(64))),
    };
    let separators = match args.get::<Option<Vec<String>>>("separators")? {
        None if indent.is_some() => [",".into(), ": ".into()],
        None => [", ".into(), ": ".into()],
        Some(two) => <[String; 2]>::try_from(two).map_err(|_| wrong("separators: two strings"))?,
    };
    let sorted = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    args.assert_all_used()?;
    let mut json = Json {
        out: String::new(),
        ascii,
        indent,
        separators,
        sorted,
    };
    json.put(value, 0)?;
    Ok(Value::from(json.out))
}

struct Json {
    out: String,
    ascii: bool,
    indent: Option<String>,
    separators: [String; 2],
    sorted: bool,
}

impl Json {
    fn put(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        bounded(depth, &self.out)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => {
                let text = number(value);
                self.out.push_str(match text.as_str() {
                    "nan" => "NaN",
                    "inf" => "Infinity",
                    "-inf" => "-Infinity",
                    other => other,
                });
            }
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', items.len(), depth, |this, i| {
                    this.put(&items[i], depth + 1)
                })?;
                self.out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list('{', keys.len(), depth, |this, i| {
                    match keys[i].as_str() {
                        Some(key) => this.text(key),
                        None => {
                            this.out.push('"');
                            this.put(&keys[i], depth + 1)?;
                            this.out.push('"');
                        }
                    }
                    this.out += &this.separators[1].clone();
                    this.put(&value.get_item(&keys[i])?, depth + 1)
                })?;
                self.out.push('}');
            }
            other => return Err(wrong(format!("tojson: {other} has no JSON"))),
        }
        Ok(())
    }

    /// All of a list but its last bracket.
    fn list(
        &mut self,
        open: char,
        items: usize,
        depth: usize,
        mut put: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for i in 0..items {
            if i > 0 {
                self.out += &self.separators[0].clone();
            }
            self.line(depth + 1);
            put(self, i)?;
        }
        if items > 0 {
            self.line(depth);
        }
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out += &indent.repeat(depth);
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || self.ascii && c as u32 > 0x7e => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out += &format!("\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Methods of strings that minijinja's own compatibility lacks, or counts in bytes.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(s) = value.as_str() else {
        return unknown_method_callback(state, value, name, args);
    };
    let characters = |at: usize| s[..at].chars().count() as i64;
    let place = |at: Option<usize>| at.map_or(-1, characters);
    Ok(match name {
        "find" => place(s.find(from_args::<(&str,)>(args)?.0)).into(),
        "rfind" => place(s.rfind(from_args::<(&str,)>(args)?.0)).into(),
        "index" | "rindex" => {
            let (what,) = from_args::<(&str,)>(args)?;
            let at = if name == "index" {
                s.find(what)
            } else {
                s.rfind(what)
            };
            characters(at.ok_or_else(|| wrong("substring not found"))?).into()
        }
        "removeprefix" => s
            .strip_prefix(from_args::<(&str,)>(args)?.0)
            .unwrap_or(s)
            .into(),
        "removesuffix" => s
            .strip_suffix(from_args::<(&str,)>(args)?.0)
            .unwrap_or(s)
            .into(),
        "partition" => {
            let (by,) = from_args::<(&str,)>(args)?;
            let (a, b) = s.split_once(by).unwrap_or((s, ""));
            let by = if a.len() < s.len() { by } else { "" };
            vec![Value::from(a), by.into(), b.into()].into()
        }
        "rpartition" => {
            let (by,) = from_args::<(&str,)>(args)?;
            let (a, b) = s.rsplit_once(by).unwrap_or(("", s));
            let by = if b.len() < s.len() { by } else { "" };
            vec![Value::from(a), by.into(), b.into()].into()
        }
        "rsplit" => {
            let (by, most) = from_args::<(&str, Option<i64>)>(args)?;
            let most =
                usize::try_from(most.unwrap_or(-1)).map_or(usize::MAX, |n| n.saturating_add(1));
            let mut parts: Vec<Value> = s.rsplitn(most, by).map(Value::from).collect();
            parts.reverse();
            parts.into()
        }
        _ => return unknown_method_callback(state, value, name, args),
    })
}
