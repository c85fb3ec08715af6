//! Model directories as transformers writes them, read and written by this crate.
//!
//! Invariant: the goldens were made by transformers (`tests/goldens/make_goldens.py`); nothing here runs Python.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use model::{
    ChatTemplate, Config, ModelDirectory, ModelError, Parameters, RopeScaling, Sizes, SpecialTokens,
    Tokenizer, WeightDtype, characters,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use trajectory::{Message, Prompt};

use crate::common::{Golden, MODELS, goldens};

const SIZES: Sizes = Sizes {
    vocab_size: 100,
    hidden_size: 16,
    intermediate_size: 24,
    num_layers: 2,
    num_heads: 4,
    num_kv_heads: 2,
    max_position_embeddings: 64,
};

fn fresh(root: &Path) -> ModelDirectory {
    ModelDirectory::fresh(&root.join("model"), &Config::fresh(&SIZES), 7).unwrap()
}

#[test]
fn weights_are_what_pytorch_reads() {
    for name in MODELS {
        let golden = Golden::open(name);
        assert!(!golden.some_parameters.is_empty());
        for (parameter, values) in &golden.some_parameters {
            assert_eq!(golden.parameters.get(parameter), values, "{name}: {parameter}");
        }
    }
}

#[test]
fn rotary_frequencies_are_those_of_transformers() {
    for name in MODELS {
        let golden = Golden::open(name);
        let ours = golden.config.rotaries()[0].inv_freq(golden.config.rotary_dim());
        assert_eq!(ours.len(), golden.inv_freq.len());
        for (ours, theirs) in ours.iter().zip(&golden.inv_freq) {
            assert!((ours / theirs - 1.0).abs() < 3e-7, "{name}: {ours} {theirs}");
        }
    }
    assert!(matches!(Golden::open("llama").config.rotaries()[0].scaling, RopeScaling::Llama3 { .. }));
    assert!(matches!(Golden::open("qwen2_sharded").config.rotaries()[0].scaling, RopeScaling::Linear { .. }));
}

/// Guards the goldens and their reader rather than the crate: a misread sequence would not give the stored loss.
#[test]
fn the_stored_loss_follows_from_the_stored_logits() {
    for name in MODELS {
        let golden = Golden::open(name);
        let mut loss = 0.0;
        for sequence in &golden.sequences {
            let rows = sequence.logits.chunks(golden.config.vocab_size);
            for (t, row) in rows.enumerate().take(sequence.tokens.len() - 1) {
                let scaled: Vec<f64> =
                    row.iter().map(|&x| f64::from(x) / f64::from(golden.temperature)).collect();
                let max = scaled.iter().copied().fold(f64::MIN, f64::max);
                let log_sum = max + scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
                loss +=
                    f64::from(sequence.coefficients[t]) * (scaled[sequence.tokens[t + 1] as usize] - log_sum);
            }
        }
        assert!((loss - f64::from(golden.loss)).abs() < 1e-3, "{name}: {loss} {}", golden.loss);
        assert!(golden.gradients.values().iter().any(|x| x.abs() > 0.1), "{name}");
    }
}

#[test]
fn an_export_differs_in_the_weights_alone() {
    for name in MODELS {
        let golden = Golden::open(name);
        let root = tempfile::tempdir().unwrap();
        let source = root.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::copy(golden.dir.join("generation_config.json"), source.join("generation_config.json")).unwrap();
        fs::write(source.join("config.json"), config_with(&golden.dir, "torch_dtype", "float32")).unwrap();
        fs::write(source.join("tokenizer.json"), characters().to_string()).unwrap();
        fs::write(source.join("chat_template.jinja"), "{{ messages }}").unwrap();
        let directory = ModelDirectory::open(&source).unwrap();
        let out = root.path().join("deep/out");
        directory.export(&out, &golden.parameters, WeightDtype::F32).unwrap();
        for entry in fs::read_dir(&source).unwrap() {
            let file = entry.unwrap().file_name();
            assert_eq!(fs::read(source.join(&file)).unwrap(), fs::read(out.join(&file)).unwrap(), "{file:?}");
        }
        assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing else is left");
        let again = ModelDirectory::open(&out).unwrap();
        assert_eq!(again.config(), &golden.config);
        let bits =
            |parameters: &Parameters| parameters.values().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&again.load_parameters().unwrap()), bits(&golden.parameters), "{name}");
        assert!(matches!(
            directory.export(&out, &golden.parameters, WeightDtype::F32),
            Err(ModelError::Exists { .. })
        ));
    }
}

/// What is saved has exactly the tensors that transformers writes, and expects.
#[test]
fn saved_tensors_have_the_names_and_shapes_of_transformers() {
    for name in MODELS {
        let golden = Golden::open(name);
        let dir = tempfile::tempdir().unwrap();
        golden.parameters.save(dir.path(), WeightDtype::F32, usize::MAX).unwrap();
        assert_eq!(shapes(dir.path()), shapes(&golden.dir), "{name}");
    }
    let fused = shapes(&goldens().join("phi3"));
    assert!(fused.contains_key("model.layers.1.self_attn.qkv_proj.weight"), "{fused:?}");
}

/// The shape of every tensor in the weight files of `dir`.
fn shapes(dir: &Path) -> BTreeMap<String, Vec<usize>> {
    let mut shapes = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap();
        if file.starts_with("model") && file.ends_with(".safetensors") {
            let bytes = fs::read(&path).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            shapes.extend(tensors.iter().map(|(name, view)| (name.to_owned(), view.shape().to_vec())));
        }
    }
    shapes
}

/// The `config.json` of `dir` that declares `dtype` under `key`, and under no other.
fn config_with(dir: &Path, key: &str, dtype: &str) -> String {
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let map = config.as_object_mut().unwrap();
    map.remove("torch_dtype");
    map.remove("dtype");
    map.insert(key.to_owned(), dtype.into());
    format!("{config:#}\n")
}

#[test]
fn weights_are_written_in_the_declared_dtype() {
    for key in ["dtype", "torch_dtype", "unknown"] {
        let root = tempfile::tempdir().unwrap();
        let path = fresh(root.path()).path().to_owned();
        fs::write(path.join("config.json"), config_with(&path, key, "bfloat16")).unwrap();
        let directory = ModelDirectory::open(&path).unwrap();
        let parameters = directory.load_parameters().unwrap();
        for dtype in WeightDtype::ALL {
            let out = root.path().join(dtype.as_str());
            directory.export(&out, &parameters, dtype).unwrap();
            let config: serde_json::Value =
                serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
            let declared = if key == "unknown" { "torch_dtype" } else { key };
            assert_eq!(config[declared], dtype.declared());
            let file = fs::read(out.join("model.safetensors")).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
            let stored = format!("{:?}", tensors.iter().next().unwrap().1.dtype()).to_lowercase();
            assert_eq!(stored, dtype.as_str());
            assert!(!out.join("manifest.json").exists(), "users may change what is exported");
        }
        directory.save(&root.path().join("own"), &parameters).unwrap();
        let again = ModelDirectory::open(&root.path().join("own")).unwrap();
        assert_eq!(again.load_parameters().unwrap().values(), parameters.values());
    }
}

#[test]
fn a_flipped_bit_of_a_directory_of_rlrun_is_not_loaded() {
    let root = tempfile::tempdir().unwrap();
    let (directory, path) = (fresh(root.path()), root.path().join("saved"));
    directory.save(&path, &directory.load_parameters().unwrap()).unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"] {
        let whole = fs::read(path.join(name)).unwrap();
        let mut bytes = whole.clone();
        // In the last number of a file of weights, and in white space otherwise: both would be read without a word.
        let at = bytes.len() - 3;
        bytes[at] = if name == "model.safetensors" { bytes[at] ^ 1 } else { b' ' };
        fs::write(path.join(name), &bytes).unwrap();
        if bytes != whole
            && let Ok(directory) = ModelDirectory::open(&path)
        {
            let error = directory.load_parameters().unwrap_err();
            assert!(matches!(error, ModelError::Damaged { .. }), "{name}: {error}");
            assert!(error.to_string().contains(name), "{error}");
        }
        fs::write(path.join(name), &whole).unwrap();
    }
    ModelDirectory::open(&path).unwrap().load_parameters().unwrap();
}

#[test]
fn weights_of_another_model_are_not_exported() {
    let root = tempfile::tempdir().unwrap();
    let directory = fresh(root.path());
    let out = root.path().join("out");
    let err = directory.export(&out, &Golden::open("llama").parameters, WeightDtype::F32).unwrap_err();
    assert!(matches!(err, ModelError::Length { .. }), "{err}");
    assert!(!out.exists());
}

#[test]
fn a_fresh_model_opens_and_repeats_with_its_seed() {
    let root = tempfile::tempdir().unwrap();
    let config = Config::fresh(&SIZES);
    let directory = fresh(root.path());
    assert_eq!(directory.config(), &config);
    assert_eq!(directory.stop_token_ids(), [2]);
    assert!(directory.template().is_none());
    assert_eq!(directory.load_parameters().unwrap().values(), Parameters::random(&config, 7).values());
    let prompt = Prompt::Text("1+1=".to_owned());
    assert_eq!(directory.encode_prompt(&prompt).unwrap(), [22, 16, 22, 34]);
    let again = ModelDirectory::fresh(&root.path().join("model"), &config, 7);
    assert!(matches!(again, Err(ModelError::Exists { .. })));
}

#[test]
fn sizes_that_make_no_sense_are_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    for (sizes, evidence) in [
        (Sizes { num_heads: 5, ..SIZES }, "num_key_value_heads"),
        (Sizes { num_heads: 16, ..SIZES }, "an even head width, got 1"),
        (Sizes { num_heads: 0, ..SIZES }, "num_attention_heads"),
        (Sizes { vocab_size: 50, ..SIZES }, "token \"~\" has id 99, but config.json says vocab_size 50"),
    ] {
        let err = ModelDirectory::fresh(&dir, &Config::fresh(&sizes), 7).unwrap_err().to_string();
        assert!(err.contains(evidence), "{err}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_tokenizer_beyond_the_embedding_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = fresh(root.path()).path().to_owned();
    let mut tokenizer = characters();
    tokenizer["model"]["vocab"]["zz"] = 100.into();
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let err = ModelDirectory::open(&dir).unwrap_err();
    assert!(matches!(&err, ModelError::Vocabulary { id: 100, vocab_size: 100, .. }), "{err}");
    assert!(err.to_string().contains("\"zz\""), "{err}");
}

#[test]
fn an_added_token_beyond_the_embedding_is_refused_in_texts() {
    let root = tempfile::tempdir().unwrap();
    let dir = fresh(root.path()).path().to_owned();
    let mut tokenizer = characters();
    let image = json!({"id": 100, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    tokenizer["added_tokens"].as_array_mut().unwrap().push(image);
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("tokenizer_config.json"), r#"{"eos_token": "<image>"}"#).unwrap();
    let directory = ModelDirectory::open(&dir).unwrap();
    assert_eq!(directory.encode_prompt(&Prompt::Text("1+1".to_owned())).unwrap().len(), 3);
    let err = directory.encode_prompt(&Prompt::Text("see <image>".to_owned())).unwrap_err().to_string();
    assert!(err.contains("\"<image>\" has id 100") && err.contains("vocab_size 100"), "{err}");
    assert_eq!(directory.stop_token_ids(), [2]);
}

#[test]
fn the_end_of_text_of_the_tokenizer_stops_too() {
    let root = tempfile::tempdir().unwrap();
    let dir = fresh(root.path()).path().to_owned();
    for end in [json!("~"), json!({"content": "~"})] {
        fs::write(dir.join("tokenizer_config.json"), json!({ "eos_token": end }).to_string()).unwrap();
        assert_eq!(ModelDirectory::open(&dir).unwrap().stop_token_ids(), [2, 99]);
    }
}

#[test]
fn prompts_that_cannot_be_encoded_say_why() {
    let root = tempfile::tempdir().unwrap();
    let directory = fresh(root.path());
    let messages = Prompt::Messages(vec![Message::new("user", "hi")]);
    let err = directory.encode_prompt(&messages).unwrap_err().to_string();
    assert!(err.contains("has no chat template") && err.contains("chat_template.jinja"), "{err}");
    let err = directory.encode_prompt(&Prompt::Text(String::new())).unwrap_err().to_string();
    assert!(err.contains("no tokens"), "{err}");
    let template =
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}";
    fs::write(directory.path().join("chat_template.jinja"), template).unwrap();
    let directory = ModelDirectory::open(directory.path()).unwrap();
    let expected = directory.tokenizer().encode("hi:", SpecialTokens::Omit).unwrap();
    assert_eq!(directory.encode_prompt(&messages).unwrap(), expected);
}

#[test]
fn text_gets_the_tokens_around_it_and_rendered_messages_do_not() {
    let root = tempfile::tempdir().unwrap();
    let dir = fresh(root.path()).path().to_owned();
    let mut tokenizer = characters();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
    });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("chat_template.jinja"), "{{ bos_token }}{{ messages[0].content }}").unwrap();
    let directory = ModelDirectory::open(&dir).unwrap();
    let text = Prompt::Text("1".to_owned());
    let messages = Prompt::Messages(vec![Message::new("user", "1")]);
    assert_eq!(directory.encode_prompt(&text).unwrap(), [1, 22]);
    assert_eq!(directory.encode_prompt(&messages).unwrap(), [1, 22]);
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(goldens().join("chat.json")).unwrap()).unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut refused = 0;
    for row in golden["rows"].as_array().unwrap() {
        let config = json!({
            "bos_token": golden["bos_token"],
            "eos_token": golden["eos_token"],
            "chat_template": golden["templates"][row["template"].as_str().unwrap()],
        });
        fs::write(root.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = ChatTemplate::load(root.path()).unwrap().unwrap();
        let messages: Vec<Message> = serde_json::from_value(row["messages"].clone()).unwrap();
        let rendered = template.render(&messages, row["add_generation_prompt"].as_bool().unwrap());
        match row["text"].as_str() {
            Some(expected) => assert_eq!(rendered.unwrap(), expected, "{row}"),
            None => {
                let err = rendered.unwrap_err().to_string();
                assert!(err.contains("user, user: conversation roles must alternate"), "{err}");
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 2);
}

#[test]
fn a_tokenizer_survives_its_file() {
    let root = tempfile::tempdir().unwrap();
    let loaded = Tokenizer::load(&fresh(root.path()).path().join("tokenizer.json")).unwrap();
    let text: String = (' '..='~').chain(['\n']).collect();
    let ids = loaded.encode(&text, SpecialTokens::Omit).unwrap();
    assert_eq!(ids, (5..100).chain([4]).collect::<Vec<u32>>());
    assert_eq!(loaded.decode(&ids).unwrap(), text);
}
