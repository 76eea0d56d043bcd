//! Chat templates against what transformers makes of them (`tools/oracle.py chat`).

mod support;

use std::collections::BTreeMap;
use std::fs;

use host::chat::{Message, Role, Template};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Oracle {
    /// Entries of `tokenizer_config.json`.
    tokens: Value,
    templates: BTreeMap<String, String>,
    talks: BTreeMap<String, Vec<Said>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    talk: String,
    thinking: bool,
    text: String,
}

fn message(said: &Said) -> Message {
    let role = match said.role.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        _ => Role::Assistant,
    };
    Message::new(role, &said.content)
}

#[test]
fn templates_render_as_transformers_has_them() {
    let file = support::data().join("oracles/chat.json");
    let oracle: Oracle = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("tokenizer_config.json"),
        oracle.tokens.to_string(),
    )
    .unwrap();
    assert!(!oracle.cases.is_empty());
    for case in &oracle.cases {
        let source = &oracle.templates[&case.template];
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let talk: Vec<Message> = oracle.talks[&case.talk].iter().map(message).collect();
        let template = Template::read(dir.path()).unwrap();
        let text = template.render(&talk, case.thinking).unwrap();
        assert_eq!(text, case.text, "{}, {}", case.template, case.talk);
    }
}

/// Of several templates that a `tokenizer_config.json` has, the one named default.
#[test]
fn one_of_several_templates() {
    let dir = tempfile::tempdir().unwrap();
    let write = |config: Value| {
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    };
    let template = |name: &str| serde_json::json!({"name": name, "template": name});
    write(serde_json::json!({"chat_template": [template("tool_use"), template("default")]}));
    let read = Template::read(dir.path()).unwrap();
    assert_eq!(read.render(&[], false).unwrap(), "default");
    write(serde_json::json!({"chat_template": [template("tool_use")]}));
    let e = Template::read(dir.path()).err().unwrap().to_string();
    assert!(e.contains("chat_template: expected a template, or"), "{e}");
}

#[test]
fn templates_that_do_not_render_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat_template.jinja");
    let many = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let raises = "{{ raise_exception('one\ntwo') }}";
    let cases = [
        (many.to_string(), "ran out of fuel"),
        (raises.into(), "one two"),
    ];
    let within = |how: &str, then: &str| format!("{{% set ns = namespace(a=1) %}}{how}{then}");
    let itself = "{% set ns.a = ns %}";
    let key = "{% for i in range(300) %}{% set ns.a = {ns.a: 1} %}{% endfor %}";
    let twice = "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}";
    let [deep, long] = ["nested too deeply", "too long"];
    let values = [
        (within(itself, "{{ ns }}"), deep),
        (within(itself, "{{ ns | string }}"), deep),
        (within(itself, "{{ [ns] | reverse }}"), deep),
        (within(itself, "{{ ns | tojson }}"), deep),
        (within(itself, "{{ raise_exception(ns) }}"), deep),
        (within(key, "{{ ns.a }}"), deep),
        (within(key, "{{ ns.a | tojson }}"), deep),
        (within(twice, "{{ ns.a }}"), long),
        (within(twice, "{{ ns.a | tojson }}"), long),
    ];
    for (source, says) in cases.into_iter().chain(values) {
        fs::write(&file, source).unwrap();
        let e = Template::read(dir.path()).unwrap().render(&[], false);
        let e = e.unwrap_err().to_string();
        assert!(e.contains(says) && !e.contains('\n'), "{e}");
    }
}

#[test]
fn the_time_is_now() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat_template.jinja");
    fs::write(&file, "{{ strftime_now('%Y') }}").unwrap();
    let year = || Template::read(dir.path()).unwrap().render(&[], false);
    let year: u32 = year().unwrap().parse().unwrap();
    assert!(year > 2000);
    fs::write(&file, "{{ strftime_now('%') }}").unwrap();
    let e = Template::read(dir.path()).unwrap().render(&[], false);
    assert!(e.unwrap_err().to_string().contains("chat template"));
}
