//! GGUF files, a model in one file as llama.cpp reads it, as the files of a Hugging Face directory.
//!
//! ```text
//! metadata   -> config.json, generation_config.json          gguf/config.rs
//!            -> tokenizer.json                               gguf/tokenizer.rs, gguf/pieces.rs
//!            -> tokenizer_config.json, special_tokens_map.json
//! tensors    -> f32 parameters                               gguf/tensors.rs
//! ```
//!
//! Invariant: the contents made here go through the readers of a directory, which honour or refuse every key. What cannot be
//! made exactly is refused with a remedy. Memory is bounded by the length of the file and by the limits of `gguf/header.rs`,
//! whatever the header declares. GGUF files are not written.

mod config;
mod header;
mod pieces;
mod tensors;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde_json::{Map, Value, json};

use crate::config::keys::JsonKeys;
use crate::{ChatTemplate, Config, ModelError, Tokenizer, files};
use header::GgufTensor;

/// The tokenizer that is used instead of that of the metadata, if it is beside the file.
const TOKENIZER: &str = "tokenizer.json";

/// Whether this path names a GGUF file, by its ending.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

/// An open GGUF file.
pub(crate) struct GgufFile {
    path: PathBuf,
    bytes: Mmap,
    metadata: Map<String, Value>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// What a GGUF file is as a model directory, without the weights.
pub(crate) struct GgufParts {
    pub(crate) config: Config,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
    /// Name and content of the files that an export writes.
    pub(crate) files: Vec<(&'static str, Vec<u8>)>,
}

impl GgufFile {
    /// Reads the header, and checks that all tensors are within the file.
    ///
    /// # Errors
    /// If the file cannot be read, is cut off or damaged, or has tensors of an unknown quantisation.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = files::map(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let header = header::read(&bytes).map_err(|reason| unusable(path, reason))?;
        Ok(Self { path: path.to_owned(), bytes, metadata: header.metadata, tensors: header.tensors })
    }

    /// Everything but the weights.
    ///
    /// # Errors
    /// If the network or the tokenizer is not supported, a key is missing or makes no sense, or the template does not compile.
    pub(crate) fn parts(&self) -> Result<GgufParts, ModelError> {
        let config = self.config()?;
        let beside = self.path.with_file_name(TOKENIZER);
        let (tokenizer, content) = if beside.exists() {
            let read = |source| ModelError::Read { path: beside.clone(), source };
            let content = files::read(&beside, files::MAX_TOKENIZER_BYTES).map_err(read)?;
            let tokenizer = Tokenizer::from_bytes(&beside, &content)?;
            self.compare(&tokenizer)?;
            (tokenizer, content)
        } else {
            let content = self.tokenizer_json()?.to_string().into_bytes();
            (Tokenizer::from_bytes(&self.path, &content)?, content)
        };
        let (special, tokenizer_config) = self.tokenizer_config(&config, &tokenizer)?;
        let tokenizer_config = pretty(&tokenizer_config);
        let template = ChatTemplate::from_config(&self.path, &tokenizer_config)?;
        let generation = json!({
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_ids,
            "pad_token_id": config.pad_token_id,
        });
        let files = vec![
            ("config.json", pretty(&config.to_json()).into_bytes()),
            ("generation_config.json", pretty(&generation).into_bytes()),
            ("tokenizer.json", content),
            ("tokenizer_config.json", tokenizer_config.into_bytes()),
            ("special_tokens_map.json", pretty(&special).into_bytes()),
        ];
        Ok(GgufParts { config, tokenizer, template, files })
    }

    /// `special_tokens_map.json` and `tokenizer_config.json`.
    fn tokenizer_config(&self, config: &Config, tokenizer: &Tokenizer) -> Result<(Value, Value), ModelError> {
        let keys = self.keys();
        let mut special = Map::new();
        for (name, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            let id = keys.token_ids(key)?.first().copied();
            if let Some(token) = id.and_then(|id| tokenizer.token(id)) {
                special.insert(name.to_owned(), token.into());
            }
        }
        let mut all = special.clone();
        // The class that takes tokenizer.json as it is.
        all.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        all.insert("model_max_length".to_owned(), config.max_context().into());
        all.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        if keys.has("tokenizer.chat_template") {
            let template = keys.text("tokenizer.chat_template")?;
            if template.len() as u64 > files::MAX_TEMPLATE_BYTES {
                let expected = format!("at most {} bytes", files::MAX_TEMPLATE_BYTES);
                return Err(keys.bad("tokenizer.chat_template", &expected));
            }
            all.insert("chat_template".to_owned(), template.into());
        }
        Ok((special.into(), all.into()))
    }

    fn keys(&self) -> JsonKeys<'_> {
        JsonKeys { path: &self.path, map: &self.metadata }
    }

    fn unusable(&self, reason: impl Into<String>) -> ModelError {
        unusable(&self.path, reason)
    }
}

fn unusable(path: &Path, reason: impl Into<String>) -> ModelError {
    ModelError::Gguf { path: path.to_owned(), reason: reason.into() }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
