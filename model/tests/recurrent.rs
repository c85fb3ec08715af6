//! Models with a recurrence: the states of sequences in the cache, and files of models that read images too.

use std::fs;
use std::path::Path;

use model::{
    Config, Decoder, KvCache, ModelDirectory, Parameters, StepSequence, ThreadPool, WeightDtype, characters,
};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};

use crate::common::{Golden, bits, logits_of, pack_of};

const PAGE: usize = KvCache::PAGE;

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (4 + (i * i * 31 + i * 17) % 96) as u32).collect()
}

struct Cached {
    decoder: Decoder,
    cache: KvCache,
}

impl Cached {
    fn new() -> Self {
        let golden = Golden::open("qwen3_5");
        let cache = KvCache::new(&golden.config, 12 * PAGE);
        Self { decoder: Decoder::new(&golden.config, &golden.parameters), cache }
    }

    /// Feeds the tokens from `position` on, and returns the logits of the last.
    fn feed(
        &mut self,
        pages: &mut Vec<u32>,
        tokens: &[u32],
        position: usize,
    ) -> candle_core::Result<Vec<u32>> {
        self.cache.make_writable(pages, position, position + tokens.len());
        let step = StepSequence { tokens, position, pages, wanted: 1, adapter: None };
        Ok(bits(&self.decoder.step(&mut self.cache, &[step], &ThreadPool::single())?))
    }

    /// The logits of the last token of `sequence`, as the trainer computes them.
    fn expected(&self, sequence: &[u32]) -> Vec<u32> {
        let logits = logits_of(&self.decoder, &pack_of([sequence]));
        bits(&logits[(sequence.len() - 1) * self.decoder.config().vocab_size..])
    }

    /// Bytes of the states that the cache has.
    fn states(&self) -> usize {
        let config = self.decoder.config();
        let empty = KvCache::new(config, 12 * PAGE).bytes();
        let all = (self.cache.bytes() - empty) as usize;
        assert!(all.is_multiple_of(4 * config.state_len()));
        all / (4 * config.state_len())
    }
}

#[test]
fn a_sequence_takes_its_state_along_and_leaves_one_where_it_is_asked_to() {
    let all = tokens(60);
    let mut of = Cached::new();
    let mut pages = Vec::new();
    for (start, end) in [(0, 10), (10, 16), (16, 17), (17, 40)] {
        assert_eq!(of.feed(&mut pages, &all[start..end], start).unwrap(), of.expected(&all[..end]));
        assert_eq!(of.states(), 1, "after {end} tokens");
        assert_eq!(of.cache.resumable(&pages, end), end);
        assert_eq!(of.cache.resumable(&pages, end - 1), 0);
    }
    of.cache.keep_state(&pages, 40);
    of.feed(&mut pages, &all[40..50], 40).unwrap();
    assert_eq!((of.states(), of.cache.resumable(&pages, 45)), (2, 40));
    of.cache.release(&pages);
    assert_eq!(of.states(), 0);
}

#[test]
fn a_shared_prefix_keeps_its_state_for_all_that_continue_it() {
    let all = tokens(60);
    for shared in [PAGE, PAGE + 3, 2 * PAGE] {
        let mut of = Cached::new();
        let mut first = Vec::new();
        of.feed(&mut first, &all[..shared], 0).unwrap();
        let mut others: Vec<Vec<u32>> = vec![first.clone(); 3];
        others.iter().for_each(|pages| of.cache.share(pages));
        for (n, pages) in others.iter_mut().enumerate() {
            let own = [&all[..shared], &all[40 + n..50]].concat();
            assert_eq!(of.feed(pages, &own[shared..], shared).unwrap(), of.expected(&own));
        }
        assert_eq!(of.cache.resumable(&first, shared), shared);
        let whole = &all[..shared + 9];
        assert_eq!(of.feed(&mut first, &whole[shared..], shared).unwrap(), of.expected(whole));
        others.iter().chain([&first]).for_each(|pages| of.cache.release(pages));
        assert_eq!((of.states(), of.cache.free_pages()), (0, of.cache.total_pages()));
    }
}

/// What is written again has no state of what was there before, and a position without a state is no place to begin.
#[test]
fn a_state_of_other_tokens_is_not_used() {
    let all = tokens(60);
    let mut of = Cached::new();
    let mut pages = Vec::new();
    of.feed(&mut pages, &all[..40], 0).unwrap();
    let err = of.feed(&mut pages, &all[20..22], 20).unwrap_err().to_string();
    assert!(err.contains("the cache has no recurrent state at position 20"), "{err}");
    of.feed(&mut pages, &all[10..30], 0).unwrap();
    assert_eq!((of.states(), of.cache.resumable(&pages, 40)), (1, 20));
    assert_eq!(of.feed(&mut pages, &all[30..35], 20).unwrap(), of.expected(&all[10..35]));
    of.cache.forget();
    assert_eq!((of.cache.bytes(), of.cache.resumable(&pages, 40)), (0, 0));
}

/// Writes the golden model `name` as a part of one that reads images too and predicts further tokens.
fn with_images(name: &str, dir: &Path) -> Golden {
    let golden = Golden::open(name);
    let text: Value = serde_json::from_slice(&fs::read(golden.dir.join("config.json")).unwrap()).unwrap();
    let kind = text["model_type"].as_str().unwrap().trim_end_matches("_text");
    let class = text["architectures"][0].as_str().unwrap().replace("ForCausalLM", "ForConditionalGeneration");
    let mut inner = text.clone();
    inner.as_object_mut().unwrap().remove("architectures");
    let config = json!({
        "model_type": kind,
        "architectures": [class],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 99,
        "vision_config": {"model_type": kind, "depth": 2},
        "text_config": inner,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), characters().to_string()).unwrap();
    let bytes = fs::read(golden.dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![
        ("model.visual.blocks.0.attn.qkv.weight".to_owned(), Dtype::F32, vec![1], vec![0; 4]),
        ("mtp.layers.0.mlp.gate_proj.weight".to_owned(), Dtype::F32, vec![1], vec![0; 4]),
    ];
    let named = |name: &str| name.replacen("model.", "model.language_model.", 1);
    for (name, view) in file.tensors().into_iter().filter(|(name, _)| !name.contains(".experts.")) {
        tensors.push((named(&name), view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    }
    let experts = golden.config.experts().map_or(0, |experts| experts.count);
    for layer in 0..golden.config.num_layers() {
        for (stacked, parts) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])]
        {
            let (mut data, mut shape) = (Vec::new(), Vec::new());
            for expert in 0..experts {
                for part in parts {
                    let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                    let view = file.tensor(&name).unwrap();
                    data.extend_from_slice(view.data());
                    shape = vec![experts, view.shape()[0] * parts.len(), view.shape()[1]];
                }
            }
            if experts > 0 {
                let name = named(&format!("model.layers.{layer}.mlp.experts.{stacked}"));
                tensors.push((name, Dtype::BF16, shape, data));
            }
        }
    }
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    golden
}

#[test]
fn the_text_of_a_model_that_reads_images_is_a_model() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let root = tempfile::tempdir().unwrap();
        let source = root.path().join("source");
        fs::create_dir(&source).unwrap();
        let golden = with_images(name, &source);
        let directory = ModelDirectory::open(&source).unwrap();
        assert_eq!(directory.config(), &golden.config, "{name}");
        let parameters = directory.load_parameters().unwrap();
        assert_eq!(bits(parameters.values()), bits(golden.parameters.values()), "{name}");
        // What is exported is of text alone, as its weights are.
        let out = root.path().join("out");
        directory.export(&out, &parameters, WeightDtype::Bf16).unwrap();
        let read = |dir: &Path| -> Value {
            serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
        };
        let (written, text) = (read(&out), read(&golden.dir));
        for key in ["model_type", "architectures", "layer_types", "hidden_size"] {
            assert_eq!(written[key], text[key], "{name}: {key}");
        }
        let names = |dir: &Path| {
            let bytes = fs::read(dir.join("model.safetensors")).unwrap();
            let mut names: Vec<_> =
                SafeTensors::deserialize(&bytes).unwrap().names().iter().map(ToString::to_string).collect();
            names.sort();
            names
        };
        assert_eq!(names(&out), names(&golden.dir), "{name}");
    }
}

#[test]
fn what_a_part_of_text_cannot_be_is_refused_by_name() {
    let golden = Golden::open("qwen3_5");
    let text: Value = serde_json::from_slice(&fs::read(golden.dir.join("config.json")).unwrap()).unwrap();
    let outer = |changes: Value| {
        let mut map = json!({"model_type": "qwen3_5", "text_config": text}).as_object().unwrap().clone();
        map.extend(changes.as_object().unwrap().clone());
        Config::from_json(Path::new("config.json"), &map)
    };
    assert_eq!(outer(json!({})).unwrap(), golden.config);
    let mut other = text.clone();
    other["model_type"] = "qwen3".into();
    for (changes, key) in [
        (json!({"text_config": null}), "text_config"),
        (json!({"text_config": other}), "text_config"),
        (json!({"tie_word_embeddings": false}), "tie_word_embeddings"),
        (json!({"architectures": ["Qwen3_5ForSequenceClassification"]}), "architectures"),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
    ] {
        let err = outer(changes.clone()).unwrap_err().to_string();
        assert!(err.contains(key), "{changes}: {err}");
    }
}

/// Without the right tensors for images a file is not one of such a model.
#[test]
fn tensors_for_images_belong_to_models_that_read_them() {
    let golden = Golden::open("qwen3_next");
    let dir = tempfile::tempdir().unwrap();
    golden.parameters.save(dir.path(), WeightDtype::F32, usize::MAX).unwrap();
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let with = |name: &str| {
        let (zero, mut views) = ([0; 4], file.tensors());
        views.push((name.to_owned(), TensorView::new(Dtype::F32, vec![1], &zero).unwrap()));
        serialize_to_file(views, None, &path).unwrap();
        Parameters::load(dir.path(), &golden.config)
    };
    assert_eq!(bits(with("mtp.fc.weight").unwrap().values()), bits(golden.parameters.values()));
    let err = with("model.visual.merger.norm.weight").unwrap_err().to_string();
    assert!(err.contains("model.visual.merger.norm.weight"), "{err}");
}
