//! Reward models against transformers: same tokens, same scores, whatever is scored beside them.

use std::path::{Path, PathBuf};

use model::{MemoryBudget, PromptCompletion, Quantization, SequenceScorer, SharedCores, ThreadPool};
use serde_json::Value;
use trajectory::Prompt;

/// Largest difference of two scores of order 1 in f32.
const TOLERANCE: f64 = 2e-5;

struct Golden {
    scorer: SequenceScorer,
    answered: Vec<PromptCompletion>,
    scores: Vec<f64>,
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

fn golden(name: &str, budget: Option<u64>) -> Golden {
    let path = directory(name);
    let scorer = SequenceScorer::open(&path, Quantization::None, &MemoryBudget::new(budget)).unwrap();
    let cases: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(path.join("scores.json")).unwrap()).unwrap();
    let text = |case: &Value, key: &str| case[key].as_str().unwrap().to_owned();
    let answered: Vec<_> = cases
        .iter()
        .map(|case| {
            scorer.encode(&Prompt::Text(text(case, "prompt")), &text(case, "completion"), true).unwrap()
        })
        .collect();
    for (case, answered) in cases.iter().zip(&answered) {
        let expected: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let found = [&answered.prompt[..], &answered.completion[..]].concat();
        assert_eq!(found, expected, "{name}: tokens of {case}");
    }
    Golden { scorer, answered, scores: cases.iter().map(|case| case["score"].as_f64().unwrap()).collect() }
}

#[test]
fn reward_models_score_as_transformers_does() {
    for name in ["scorer_qwen2", "scorer_deberta", "scorer_xlm_roberta"] {
        let Golden { scorer, answered, scores } = golden(name, None);
        let found = scorer.score(&answered, 1000, &ThreadPool::single()).unwrap();
        for (found, expected) in found.iter().zip(&scores) {
            assert!((f64::from(*found) - expected).abs() < TOLERANCE, "{name}: {found} is not {expected}");
        }
        assert!(scores.iter().any(|score| (score - scores[0]).abs() > 0.1), "scores differ");
    }
}

#[test]
fn a_score_does_not_depend_on_the_batch_the_threads_or_where_the_weights_are() {
    let Golden { scorer, answered, .. } = golden("scorer_qwen2", None);
    // Completions of one prompt share it, in any order, beside others.
    let mut mixed = answered.clone();
    mixed.extend(
        answered.iter().map(|a| PromptCompletion { prompt: answered[0].prompt.clone(), ..a.clone() }),
    );
    mixed.push(PromptCompletion { prompt: Vec::new(), completion: answered[1].prompt.clone() });
    mixed.push(PromptCompletion { prompt: answered[1].prompt.clone(), completion: Vec::new() });
    let together = scorer.score(&mixed, 1000, &ThreadPool::single()).unwrap();
    let pool = ThreadPool::new(&SharedCores::new(3), 3);
    assert_eq!(scorer.score(&mixed, 50, &pool).unwrap(), together);
    let swapped = golden("scorer_qwen2", Some(0)).scorer;
    assert!(swapped.is_swapped() && !scorer.is_swapped());
    for (one, expected) in mixed.iter().zip(&together) {
        assert_eq!(scorer.score(std::slice::from_ref(one), 1, &ThreadPool::single()).unwrap(), [*expected]);
        assert_eq!(swapped.score(std::slice::from_ref(one), 1, &ThreadPool::single()).unwrap(), [*expected]);
    }
    assert_eq!(together[mixed.len() - 2], together[mixed.len() - 1], "a prompt is a prompt");
}

#[test]
fn models_without_a_score_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let open = |path: &Path| SequenceScorer::open(path, Quantization::None, &MemoryBudget::default());
    let language = scratch.path().join("language");
    std::fs::create_dir(&language).unwrap();
    for (from, file) in
        [("qwen2", "config.json"), ("qwen2", "model.safetensors"), ("scorer_qwen2", "tokenizer.json")]
    {
        std::fs::copy(directory(from).join(file), language.join(file)).unwrap();
    }
    let error = open(&language).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("architectures"), "{error}");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(directory("scorer_deberta").join(file), scratch.path().join(file)).unwrap();
    }
    let config = std::fs::read_to_string(scratch.path().join("config.json")).unwrap();
    let two = config.replace("\"0\": \"LABEL_0\"", "\"0\": \"LABEL_0\", \"1\": \"LABEL_1\"");
    std::fs::write(scratch.path().join("config.json"), two).unwrap();
    let error = open(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("2 labels") && error.contains("one label"), "{error}");
    let wide = config.replace("\"hidden_size\": 32", "\"hidden_size\": 64");
    std::fs::write(scratch.path().join("config.json"), wide).unwrap();
    let error = open(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("are not those of its config.json"), "{error}");
}
