//! A model directory in the layout of Hugging Face, or a GGUF file that is read as one.
//!
//! Invariant: the parts of an open directory are consistent (every id of an encoded text has a row of the embedding). An export
//! differs from it in the weights and their declared number format alone, even if its files have changed since. There is no
//! download, and weights are not kept.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde_json::{Map, Value, json};
use trajectory::Prompt;

use crate::characters::{characters, characters_config};
use crate::config::keys::JsonKeys;
use crate::config::text::text_part;
use crate::gguf::{self, GgufFile, GgufParts};
use crate::tokenizer::encode_error;
use crate::weight_files::{INDEX, SINGLE};
use crate::{
    ChatTemplate, Config, Head, ModelError, Parameters, Reduction, SpecialTokens, Tokenizer, WeightDtype,
};
use crate::{atomic, files, manifest};

/// Bytes per weight file before an export is split, as transformers has long done it.
const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// Files other than weights that describe a model; an export copies those that are there.
pub const DESCRIPTION_FILES: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];

/// An export copies it too.
const LICENSE: &str = "LICENSE";

/// A model directory without its weights, or a GGUF file without its tensors.
pub struct ModelDirectory {
    path: PathBuf,
    config: Config,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop_token_ids: Vec<u32>,
    /// What prompts of messages say about tools.
    tools: Vec<Value>,
    /// Name and content of the files that an export copies; those of a GGUF file are made from its metadata. They are kept
    /// in memory because the directory may be deleted: a run that resumes from a checkpoint outlives that checkpoint.
    copied: Vec<(&'static str, Vec<u8>)>,
}

impl ModelDirectory {
    /// Whether this path names a model, as far as its ending and its files show: a directory with a `config.json`, or a GGUF
    /// file. This is the one place that says so.
    #[must_use]
    pub fn is_model(path: &Path) -> bool {
        Self::is_file(path) || path.join("config.json").is_file()
    }

    /// Whether the directory `path` has weights; that of a policy over a base that stays quantised has none.
    #[must_use]
    pub fn has_weights(path: &Path) -> bool {
        path.join(SINGLE).exists() || path.join(INDEX).exists()
    }

    /// Whether this path names a model in one file: GGUF.
    #[must_use]
    pub fn is_file(path: &Path) -> bool {
        gguf::is_gguf(path) && path.exists()
    }

    /// Reads everything but the weights and checks that the parts are consistent.
    ///
    /// # Errors
    /// If a file is missing or broken, the network is not supported, or the tokenizer has ids beyond the embedding.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        if gguf::is_gguf(dir) {
            let GgufParts { config, tokenizer, template, files } = GgufFile::open(dir)?.parts()?;
            let tokenizer = tokenizer.with_embedding(config.vocab_size)?;
            let stop_token_ids = config.eos_token_ids.clone();
            return Ok(Self {
                path: dir.to_owned(),
                config,
                tokenizer,
                template,
                stop_token_ids,
                tools: Vec::new(),
                copied: files,
            });
        }
        let config = Config::load(dir)?;
        let tokenizer = Tokenizer::load(&dir.join("tokenizer.json"))?.with_embedding(config.vocab_size)?;
        let template = ChatTemplate::load(dir)?;
        let mut stop: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
        stop.extend(end_token(dir, &tokenizer).filter(|id| (*id as usize) < config.vocab_size));
        let stop_token_ids = stop.into_iter().collect();
        let mut copied = read_copied(dir)?;
        describe_text(dir, &mut copied)?;
        let (path, tools) = (dir.to_owned(), Vec::new());
        Ok(Self { path, config, tokenizer, template, stop_token_ids, tools, copied })
    }

    /// Writes a new character-level model with random weights.
    ///
    /// # Errors
    /// If the directory exists already or cannot be written, or the sizes make no sense.
    pub fn fresh(dir: &Path, config: &Config, seed: u64) -> Result<Self, ModelError> {
        let map = config.to_json();
        if let Some(map) = map.as_object() {
            Config::from_json(&dir.join("config.json"), map)?;
        }
        let tokenizer = characters();
        Tokenizer::from_json(&dir.join("tokenizer.json"), &tokenizer)?.with_embedding(config.vocab_size)?;
        let generation = json!({
            "bos_token_id": map["bos_token_id"],
            "eos_token_id": map["eos_token_id"],
            "pad_token_id": map["pad_token_id"],
        });
        atomic::directory(dir, |dir| {
            write_json(&dir.join("config.json"), &map)?;
            write_json(&dir.join("generation_config.json"), &generation)?;
            write_json(&dir.join("tokenizer.json"), &tokenizer)?;
            write_json(&dir.join("tokenizer_config.json"), &characters_config(config.max_context()))?;
            Parameters::random(config, seed).save(dir, WeightDtype::F32, MAX_SHARD_BYTES)
        })?;
        Self::open(dir)
    }

    /// The same model, whose prompts of messages describe `tools`, objects in the form of OpenAI's `tools`.
    #[must_use]
    pub fn with_tools(self, tools: Vec<Value>) -> Self {
        Self { tools, ..self }
    }

    /// The same model with another head, which its exports declare; see [`Parameters::with_head`] for the weights.
    #[must_use]
    pub fn with_head(mut self, head: Head) -> Self {
        self.config.head = head;
        self.edit_config(|config, map| {
            map.remove("value_head");
            config.write_head(map);
        });
        self
    }

    /// The same model with another order of sums, which its exports declare.
    #[must_use]
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        if self.config.reduction != reduction {
            self.config.reduction = reduction;
            self.edit_config(Config::write_reduction);
        }
        self
    }

    /// Edits the `config.json` of exports.
    fn edit_config(&mut self, edit: impl Fn(&Config, &mut Map<String, Value>)) {
        for (_, content) in self.copied.iter_mut().filter(|(name, _)| *name == "config.json") {
            if let Ok(Value::Object(mut map)) = serde_json::from_slice(content) {
                edit(&self.config, &mut map);
                *content = format!("{:#}\n", Value::Object(map)).into_bytes();
            }
        }
    }

    /// Reads the weights. All files of a directory that has a manifest are compared with it first.
    ///
    /// # Errors
    /// See [`Parameters::load`] and [`manifest::check`].
    pub fn load_parameters(&self) -> Result<Parameters, ModelError> {
        manifest::check(&self.path)?;
        Parameters::load(&self.path, &self.config)
    }

    /// Writes a new directory with these weights as `dtype`, which its `config.json` declares, and everything else as it
    /// is here. It appears whole or not at all.
    ///
    /// # Errors
    /// If `out_dir` exists already or cannot be written, the weights are of another model, or not finite in `dtype`.
    pub fn export(
        &self,
        out_dir: &Path,
        parameters: &Parameters,
        dtype: WeightDtype,
    ) -> Result<(), ModelError> {
        self.check_layout(parameters)?;
        atomic::directory(out_dir, |dir| self.fill(dir, parameters, dtype))
    }

    /// The same for rlrun itself to read back: as f32, which loses nothing, and with a manifest.
    ///
    /// # Errors
    /// Those of [`Self::export`].
    pub fn save(&self, out_dir: &Path, parameters: &Parameters) -> Result<(), ModelError> {
        self.check_layout(parameters)?;
        atomic::directory(out_dir, |dir| {
            self.fill(dir, parameters, WeightDtype::F32)?;
            manifest::write(dir)
        })
    }

    /// Writes a new directory with everything but the weights, and a manifest.
    ///
    /// # Errors
    /// If `out_dir` exists already or cannot be written.
    pub fn describe(&self, out_dir: &Path) -> Result<(), ModelError> {
        atomic::directory(out_dir, |dir| {
            self.write_description(dir, WeightDtype::F32)?;
            manifest::write(dir)
        })
    }

    fn check_layout(&self, parameters: &Parameters) -> Result<(), ModelError> {
        let expected = crate::Layout::new(&self.config);
        if **parameters.layout() != expected {
            return Err(ModelError::Length { expected: expected.len(), found: parameters.values().len() });
        }
        Ok(())
    }

    fn fill(&self, dir: &Path, parameters: &Parameters, dtype: WeightDtype) -> Result<(), ModelError> {
        self.write_description(dir, dtype)?;
        parameters.save(dir, dtype, MAX_SHARD_BYTES)
    }

    fn write_description(&self, dir: &Path, dtype: WeightDtype) -> Result<(), ModelError> {
        for (name, content) in &self.copied {
            let to = dir.join(name);
            let content = if *name == "config.json" { declaring(content, dtype) } else { content.into() };
            fs::write(&to, content).map_err(|source| ModelError::Write { path: to, source })?;
        }
        Ok(())
    }

    /// Tokens of a prompt, at least one. Text gets the special tokens that `tokenizer.json` puts around texts; messages
    /// are rendered with the chat template, which contains its own, and end with the assistant's turn opened.
    ///
    /// # Errors
    /// If messages are given and there is no template or it refuses them, or the prompt gives no tokens.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, ModelError> {
        let rendered;
        let (text, special) = match prompt {
            Prompt::Text(text) => (text, SpecialTokens::Add),
            Prompt::Messages(messages) => {
                let missing = || ModelError::NoTemplate { dir: self.path.clone() };
                let template = self.template.as_ref().ok_or_else(missing)?;
                rendered = template.render_with_tools(messages, &self.tools, true)?;
                (&rendered, SpecialTokens::Omit)
            }
        };
        let ids = self.tokenizer.encode(text, special)?;
        if ids.is_empty() {
            return Err(encode_error(text, "it gives no tokens, so there is nothing to continue"));
        }
        Ok(ids)
    }

    /// `[n]` ids of the tokens that end a completion, ascending: those of `config.json` and `generation_config.json`, and the
    /// tokenizer's own end of text.
    #[must_use]
    pub fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    /// Name and content of the files that an export writes beside the weights.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.copied.iter().map(|(name, content)| (*name, content.as_slice()))
    }

    /// The shape of the network.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Where it was read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Length of the `tokenizer.json` of a model, bytes, made from the metadata of a GGUF file.
///
/// # Errors
/// If it cannot be read.
pub fn tokenizer_bytes(model: &Path) -> Result<u64, ModelError> {
    if gguf::is_gguf(model) {
        let parts = GgufFile::open(model)?.parts()?;
        let tokenizer = parts.files.iter().find(|(name, _)| *name == "tokenizer.json");
        return Ok(tokenizer.map_or(0, |(_, content)| content.len() as u64));
    }
    let path = model.join("tokenizer.json");
    let metadata = fs::metadata(&path).map_err(|source| ModelError::Read { path, source })?;
    Ok(metadata.len())
}

impl fmt::Debug for ModelDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelDirectory")
            .field("path", &self.path)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn read_copied(dir: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, ModelError> {
    let names = DESCRIPTION_FILES.into_iter().chain([LICENSE]);
    let there = names.map(|name| (name, dir.join(name))).filter(|(_, path)| path.exists());
    there
        .map(|(name, path)| match files::read(&path, files::MAX_TOKENIZER_BYTES) {
            Ok(content) => Ok((name, content)),
            Err(source) => Err(ModelError::Read { path, source }),
        })
        .collect()
}

/// Of a model that reads images too, `config.json` becomes that of its part of text, which is all that an export has.
fn describe_text(dir: &Path, copied: &mut [(&'static str, Vec<u8>)]) -> Result<(), ModelError> {
    for (name, content) in copied.iter_mut().filter(|(name, _)| *name == "config.json") {
        let Ok(Value::Object(map)) = serde_json::from_slice(content) else { continue };
        let path = dir.join(*name);
        if let Some(text) = text_part(&JsonKeys { path: &path, map: &map })? {
            *content = format!("{:#}\n", Value::Object(text)).into_bytes();
        }
    }
    Ok(())
}

/// The content of a `config.json` with `dtype` as the number format of the weights, which are not quantised any more. Readers
/// such as transformers convert what they read to it. The key is `dtype` since transformers 4.56, which still reads the
/// `torch_dtype` of before.
fn declaring(config: &[u8], dtype: WeightDtype) -> Cow<'_, [u8]> {
    let Ok(Value::Object(mut map)) = serde_json::from_slice(config) else { return config.into() };
    let there: Vec<&str> =
        ["dtype", "torch_dtype"].into_iter().filter(|key| map.contains_key(*key)).collect();
    let keys = if there.is_empty() { vec!["torch_dtype"] } else { there };
    let quantised = map.remove("quantization_config").is_some();
    let declared = |key: &&str| map.get(*key).and_then(Value::as_str) == Some(dtype.declared());
    if !quantised && keys.iter().all(declared) {
        return config.into();
    }
    for key in keys {
        map.insert(key.to_owned(), dtype.declared().into());
    }
    format!("{:#}\n", Value::Object(map)).into_bytes().into()
}

/// The id of `eos_token` in `tokenizer_config.json`, which chat fine-tunes change more readily than `config.json`.
fn end_token(dir: &Path, tokenizer: &Tokenizer) -> Option<u32> {
    let text = files::read_text(&dir.join("tokenizer_config.json"), files::MAX_JSON_BYTES).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    let token = &config["eos_token"];
    tokenizer.token_id(token.as_str().or_else(|| token["content"].as_str())?)
}

fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    fs::write(path, format!("{value:#}\n"))
        .map_err(|source| ModelError::Write { path: path.to_owned(), source })
}
