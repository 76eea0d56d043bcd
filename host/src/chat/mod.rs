//! Messages to the text that a model takes, by its chat template.

mod jinja;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::{Environment, Error, context};
use serde::Serialize;
use serde_json::Value;

use crate::files;
use crate::model::ModelError;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions before everything.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who said it.
    pub role: Role,
    /// What.
    pub content: String,
}

impl Message {
    /// Of these parts.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
        }
    }
}

/// A model's chat template.
pub struct Template {
    /// Where it came from; none for GLM's own form.
    file: Option<PathBuf>,
    environment: Environment<'static>,
    /// `bos_token` and the like, as `tokenizer_config.json` has them.
    tokens: BTreeMap<String, String>,
}

/// GLM's form: role tokens without newlines, and an empty thought unless thoughts are wanted.
const GLM: &str = "[gMASK]<sop>\
{% for m in messages %}<|{{ m.role }}|>\
{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}\
{% endfor %}\
{% if add_generation_prompt %}<|assistant|>\
{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}";

const REMEDY: &str = "copy it from the checkpoint again";

impl Template {
    /// `chat_template.jinja` in `dir`, or `chat_template` of `tokenizer_config.json`; where there is
    /// neither, GLM's form.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let config = dir.join("tokenizer_config.json");
        let value: Value = match config.is_file() {
            false => Value::Null,
            true => {
                let bytes = files::read(&config).map_err(|e| ModelError::io(&config, e, REMEDY))?;
                serde_json::from_slice(&bytes)
                    .map_err(|e| ModelError::field(&config, "file", "JSON", e, REMEDY))?
            }
        };
        let tokens = tokens(&value);
        let file = dir.join("chat_template.jinja");
        if file.is_file() {
            let source =
                files::read_to_string(&file).map_err(|e| ModelError::io(&file, e, REMEDY))?;
            return Self::new(Some(file), &source, tokens);
        }
        // Of several the one that is used where none is named.
        let template = match &value["chat_template"] {
            Value::Array(several) => several
                .iter()
                .find(|t| t["name"] == "default")
                .map_or(&Value::Null, |t| &t["template"]),
            one => one,
        };
        match template {
            Value::String(source) => Self::new(Some(config), source, tokens),
            Value::Null if value["chat_template"].is_null() => Self::new(None, GLM, tokens),
            _ => {
                let expected = "a template, or several of which one is named \"default\"";
                let found = "none such";
                Err(ModelError::field(
                    &config,
                    "chat_template",
                    expected,
                    found,
                    REMEDY,
                ))
            }
        }
    }

    fn new(
        file: Option<PathBuf>,
        source: &str,
        tokens: BTreeMap<String, String>,
    ) -> Result<Self, ModelError> {
        let environment = jinja::environment(source).map_err(|e| wrong(file.as_deref(), &e))?;
        Ok(Self {
            file,
            environment,
            tokens,
        })
    }

    /// Whether the model has a template of its own.
    pub fn is_own(&self) -> bool {
        self.file.is_some()
    }

    /// The text of a conversation, up to where the model's next answer begins.
    pub fn render(&self, messages: &[Message], thinking: bool) -> Result<String, ModelError> {
        let render = || -> Result<String, Error> {
            // Without tools or documents transformers says that there are none.
            self.environment.get_template("chat")?.render(context! {
                messages => messages,
                tools => (),
                documents => (),
                add_generation_prompt => true,
                enable_thinking => thinking,
                ..minijinja::Value::from_serialize(&self.tokens)
            })
        };
        render().map_err(|e| wrong(self.file.as_deref(), &e))
    }
}

fn wrong(file: Option<&Path>, e: &Error) -> ModelError {
    let file = file.unwrap_or(Path::new("GLM's chat form"));
    // A template may raise what it likes; an error is a line.
    let e = e.to_string().replace(['\n', '\r'], " ");
    ModelError::field(file, "chat template", "one that renders", e, REMEDY)
}

/// Special tokens by the names that templates use: texts, or objects with their `content`.
fn tokens(config: &Value) -> BTreeMap<String, String> {
    let entries = config.as_object().into_iter().flatten();
    entries
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, token)| {
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.clone(), text.into()))
        })
        .collect()
}

/// An answer without the thoughts before it, as later turns see it.
pub fn spoken(answer: &str) -> &str {
    match answer.rsplit_once("</think>") {
        Some((_, spoken)) => spoken.trim_start(),
        None => answer,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn talk() -> Vec<Message> {
        vec![
            Message::new(Role::System, "Be brief."),
            Message::new(Role::User, "Hello"),
            Message::new(Role::Assistant, "Hi."),
            Message::new(Role::User, "Bye\nnow"),
        ]
    }

    #[test]
    fn glm_form() {
        let dir = tempfile::tempdir().unwrap();
        let template = Template::read(dir.path()).unwrap();
        assert!(!template.is_own());
        assert_eq!(
            template.render(&talk(), false).unwrap(),
            "[gMASK]<sop><|system|>Be brief.<|user|>Hello<|assistant|><think></think>Hi.\
             <|user|>Bye\nnow<|assistant|><think></think>"
        );
        let thinking = template.render(&talk(), true).unwrap();
        assert!(thinking.ends_with("<|assistant|><think>"));
        assert_eq!(spoken("<think>hm</think>\nYes."), "Yes.");
        assert_eq!(spoken("Yes."), "Yes.");
    }

    /// What GLM's published templates do, in words of our own: contents may be lists of parts, thoughts
    /// of earlier turns are dropped, macros, namespaces, Python's string methods, `is defined`.
    #[test]
    fn templates_as_glm_writes_them() {
        let dir = tempfile::tempdir().unwrap();
        let source = "\
[gMASK]<sop>
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part is mapping and part.type == 'text' -%}{{- part.text }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|system|>{{ tools | tojson }}{%- endif -%}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not \
text(m.content).endswith('/nothink')) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set thought = '' %}
{%- set content = text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user and thought -%}{{ '\\n<think>' + thought.strip() + '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- elif m.role == 'system' -%}<|system|>{{ text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
";
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let template = Template::read(dir.path()).unwrap();
        let mut talk = talk();
        talk[2].content = "<think>\nhm, hm\n</think>\n\nHi.".into();
        assert_eq!(
            template.render(&talk, false).unwrap(),
            "[gMASK]<sop><|system|>Be brief.<|user|>Hello/nothink<|assistant|>\n<think></think>\nHi.\
             <|user|>Bye\nnow/nothink<|assistant|>\n<think></think>"
        );
        assert_eq!(
            template.render(&talk[..3], true).unwrap(),
            "[gMASK]<sop><|system|>Be brief.<|user|>Hello<|assistant|>\n<think>hm, hm</think>\nHi.\
             <|assistant|>"
        );
    }

    #[test]
    fn own_templates_are_rendered_as_jinja() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("chat_template.jinja");
        let source = "\
{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}
    {%- set ns.n = ns.n + 1 -%}
    {%- if m['role'] == 'system' and not loop.first -%}
        {{- raise_exception('late') -}}
    {%- endif -%}
    {{- '<|' ~ m.role ~ '|>' + m.content.strip().split('\\n')[0] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{{ ns.n }}{%- endif -%}
";
        fs::write(&file, source).unwrap();
        let template = Template::read(dir.path()).unwrap();
        assert!(template.is_own());
        assert_eq!(
            template.render(&talk(), false).unwrap(),
            "<|system|>Be brief.<|user|>Hello<|assistant|>Hi.<|user|>Bye<|assistant|>4"
        );
        let mut late = talk();
        late.swap(0, 1);
        let e = template.render(&late, false).unwrap_err().to_string();
        assert!(
            e.contains("chat_template.jinja") && e.contains("late"),
            "{e}"
        );
        fs::write(&file, "{% for %}").unwrap();
        let e = Template::read(dir.path()).err().unwrap().to_string();
        assert!(
            e.contains("chat template: expected one that renders"),
            "{e}"
        );
        // In a tokenizer's configuration, as older checkpoints have it.
        fs::remove_file(&file).unwrap();
        let config = serde_json::json!({ "chat_template": "{{ messages | length }}" });
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = Template::read(dir.path()).unwrap();
        assert_eq!(template.render(&talk(), false).unwrap(), "4");
    }
}
