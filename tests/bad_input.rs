//! Wrong input: exit status 2, the evidence in the message, and no run directory that would block the next attempt.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::{Home, tiny_model};

const ROWS: &str = "{\"question\":\"1+1=\",\"answer\":\"2\"}\n{\"question\":\"2+2=\",\"answer\":\"4\"}\n";

/// A directory with a tiny model in `model/`, tasks in `tasks.jsonl` and a recipe for both.
struct TinyHome {
    home: Home,
}

impl TinyHome {
    fn new() -> Self {
        let home = Home::new();
        tiny_model(&home.path("model"), 64);
        home.write("tasks.jsonl", ROWS);
        let recipe = "[model]\npath = \"model\"\n[data]\ntrain = \"tasks.jsonl\"\nmax_prompt_length = 16\n\
                      [rollout]\nmax_completion_length = 8\n[[rewards]]\nkind = \"exact\"\n\
                      [buffer]\nbatch_groups = 2\n[trainer]\nsteps = 1\n";
        home.write("recipe.toml", recipe);
        Self { home }
    }

    /// Runs the recipe with `sets`, which must be refused with `evidence` by the run and by `check`, and must leave
    /// no file.
    fn refuses(&self, sets: &[&str], evidence: &[&str]) {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        self.home.rlrun(&[&["recipe.toml", "--run-dir", "run"], &sets[..]].concat()).refused(evidence);
        assert!(!self.home.path("run").exists(), "a run directory is left behind");
        self.home.rlrun(&[&["check", "recipe.toml"], &sets[..]].concat()).refused(&[]);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.home.path(name)
    }

    /// Changes `config.json` of the model.
    fn configure(&self, change: impl FnOnce(&mut Value)) {
        let path = self.file("model/config.json");
        let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(path, config.to_string()).unwrap();
    }
}

/// Two terabytes of weights are refused before they are allocated.
#[test]
fn a_model_that_is_larger_than_the_memory_is_refused() {
    let home = Home::new();
    let sets = [
        "model.random.hidden_size=65536",
        "model.random.intermediate_size=262144",
        "model.random.num_layers=8",
        "warmup.steps=0",
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let evidence = ["the weights of the model take 1920.0 GiB in f32", "quantized_base"];
    home.rlrun(&[&["check", "small.toml"], &sets[..]].concat()).refused(&evidence);
    home.rlrun(&[&["small.toml", "--run-dir", "run"], &sets[..]].concat()).refused(&evidence);
    assert!(!home.path("run").exists(), "a run directory is left behind");
}

/// Model files are untrusted data: a template that never ends, a pipe in place of a file.
#[test]
fn models_that_hang_or_exhaust_memory_are_refused() {
    let bench = TinyHome::new();
    let chat = ["data.chat=true"];
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}\
                 {% endfor %}{% endfor %}";
    bench.home.write("model/chat_template.jinja", loops);
    bench.refuses(&chat, &["chat_template.jinja", "it gave no text within 10 s"]);
    let doubling = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}\
                    {% endfor %}{{ ns.s }}";
    bench.home.write("model/chat_template.jinja", doubling);
    let said =
        bench.home.rlrun(&["check", "recipe.toml", "--set", chat[0]]).refused(&["chat_template.jinja"]);
    // On a busy machine the time limit can be reached first.
    assert!(said.contains("256 MiB of memory") || said.contains("within 10 s"), "{said}");
    bench.home.write("model/chat_template.jinja", "{{ messages[0].content }}");
    bench.home.rlrun(&["check", "recipe.toml", "--set", "data.chat=true"]).ok();
    for file in ["model/chat_template.jinja", "model/config.json", "model/model.safetensors", "tasks.jsonl"] {
        let (path, kept) = (bench.file(file), bench.file("kept"));
        std::fs::rename(&path, &kept).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let name = file.rsplit('/').next().unwrap();
        bench.home.rlrun(&["check", "recipe.toml", "--set", "data.chat=true"]).refused(&[name]);
        std::fs::rename(&kept, &path).unwrap();
    }
}

/// The unchanged bench of the other tests is valid.
#[test]
fn a_correct_recipe_runs_after_a_refused_one() {
    let bench = TinyHome::new();
    bench.refuses(&["data.prompt_column=\"nothing\""], &["nothing"]);
    bench.home.rlrun(&["recipe.toml", "--run-dir", "run"]).ok();
    bench.home.rlrun(&["check", "recipe.toml"]).ok();
}

#[test]
fn missing_model_files_are_named() {
    for (file, evidence) in [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
    ] {
        let bench = TinyHome::new();
        std::fs::remove_file(bench.file("model").join(file)).unwrap();
        bench.refuses(&[], &[evidence]);
    }
    TinyHome::new().refuses(&["model.path=\"nowhere\""], &["nowhere"]);
}

#[test]
fn truncated_weights_are_refused() {
    let bench = TinyHome::new();
    let path = bench.file("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for len in [0, 5, 100, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..len]).unwrap();
        bench.refuses(&[], &["model.safetensors is not a whole safetensors file", &format!("({len} bytes)")]);
    }
}

#[test]
fn weights_of_another_shape_are_named() {
    let bench = TinyHome::new();
    bench.configure(|config| config["intermediate_size"] = json!(24));
    bench.refuses(
        &[],
        &["model.safetensors: tensor model.layers.0.mlp.down_proj.weight has shape", "[16, 32]", "[16, 24]"],
    );
}

#[test]
fn networks_that_are_not_supported_are_refused() {
    let bench = TinyHome::new();
    bench.configure(|config| config["model_type"] = json!("gpt_neox"));
    bench.refuses(&[], &["config.json: `model_type` is", "gpt_neox", "llama", "qwen3"]);
    bench.configure(|config| {
        config["model_type"] = json!("qwen2");
        config["rope_parameters"] = Value::Null;
        config["rope_scaling"] = json!({"rope_type": "longrope", "factor": 4.0});
    });
    bench.refuses(&[], &["config.json: `", "rope_type", "longrope", "llama3"]);
}

#[test]
fn broken_tokenizers_are_named() {
    let bench = TinyHome::new();
    let path = bench.file("model/tokenizer.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    for broken in [&whole[..whole.len() / 2], "{}", "not JSON"] {
        std::fs::write(&path, broken).unwrap();
        bench.refuses(&[], &["tokenizer.json"]);
    }
    std::fs::write(&path, whole).unwrap();
    bench.configure(|config| config["vocab_size"] = json!(50));
    bench.refuses(&[], &["tokenizer.json: token", "has id 99", "vocab_size 50"]);
}

#[test]
fn broken_datasets_are_named_to_the_line() {
    let bench = TinyHome::new();
    bench.home.write("tasks.jsonl", format!("{ROWS}\n{{\"question\": \n"));
    bench.refuses(&[], &["tasks.jsonl:4: not valid JSON"]);
    bench.home.write("tasks.jsonl", format!("{ROWS}[1]\n"));
    bench.refuses(&[], &["tasks.jsonl:3: a row must be an object", "a list"]);
    bench.home.write("tasks.jsonl", format!("{ROWS}{{\"question\":\"3\"}}\n"));
    bench.refuses(&[], &["tasks.jsonl:3: no column `answer`", "`question`"]);
    bench.home.write("tasks.jsonl", "\n\n");
    bench.refuses(&[], &["the dataset has no rows", "tasks.jsonl", "`data.train` and `data.eval`"]);
    bench.home.write("tasks.csv", "question,answer\n");
    bench.refuses(&["data.train=\"tasks.csv\""], &["the dataset has no rows", "tasks.csv"]);
    bench.home.write("tasks.txt", "question,answer\n");
    bench.refuses(&["data.train=\"tasks.txt\""], &["tasks.txt", ".jsonl"]);
    bench.refuses(&["data.train=\"nothing.jsonl\""], &["nothing.jsonl"]);
}

#[test]
fn missing_columns_list_those_that_exist() {
    let bench = TinyHome::new();
    bench.refuses(
        &["data.prompt_column=\"Frage\""],
        &["tasks.jsonl:1: no column `Frage`", "`question`, `answer`"],
    );
    bench.refuses(
        &["data.prompt_template=\"{frage}?\""],
        &["tasks.jsonl:1", "placeholder `{frage}`", "`question`, `answer`"],
    );
}

#[test]
fn prompts_over_the_limit_name_the_row_and_both_numbers() {
    let bench = TinyHome::new();
    let long = "1".repeat(17);
    bench.home.write("tasks.jsonl", format!("{ROWS}{{\"question\":\"{long}\",\"answer\":\"0\"}}\n"));
    bench.refuses(&[], &["dataset row 2 has 17 tokens, data.max_prompt_length is 16", "overlong_prompts"]);
    bench
        .refuses(&["data.max_prompt_length=1", "data.overlong_prompts=\"drop\""], &["all 3 prompts", "= 1 "]);
    bench.home.write("tasks.jsonl", ROWS);
    bench.refuses(
        &["rollout.max_completion_length=61"],
        &["the longest prompt has 4 tokens; with 61 of completion", "the 64"],
    );
}

#[test]
fn chat_needs_a_template() {
    TinyHome::new().refuses(&["data.chat=true"], &["model has no chat template", "chat_template.jinja"]);
}

#[test]
fn unusable_run_directories_are_refused() {
    let bench = TinyHome::new();
    bench.home.write("file", "");
    let args = ["recipe.toml", "--run-dir", "file/run"];
    bench.home.rlrun(&args).refused(&["cannot create `file/run`", "choose a writable place"]);

    let named = ["recipe.toml", "--name", "mine"];
    bench.home.rlrun(&named).ok();
    let again =
        bench.home.rlrun(&named).refused(&["`outputs/mine` is not empty", "rlrun resume outputs/mine"]);
    assert!(again.contains("--name NAME"), "{again}");
    bench.home.write("thesis/thesis.tex", "");
    bench
        .home
        .rlrun(&["recipe.toml", "--run-dir", "thesis"])
        .refused(&["`thesis` is not empty", "holds no run"]);
    assert!(bench.file("thesis/thesis.tex").is_file() && bench.file("outputs/mine/resolved.toml").is_file());
    bench.home.rlrun(&["resume", "thesis"]).refused(&["no run directory", "resolved.toml"]);
}

#[test]
fn mistakes_in_a_recipe_are_shown_with_line_and_column() {
    let bench = TinyHome::new();
    let recipe = std::fs::read_to_string(bench.file("recipe.toml")).unwrap();
    bench.home.write("recipe.toml", recipe.replace("batch_groups", "batch_group"));
    bench.refuses(
        &[],
        &["unknown key `buffer.batch_group`", "recipe.toml:11:1", "did you mean `buffer.batch_groups`?"],
    );
    bench.home.write("recipe.toml", recipe.replace("steps = 1", "steps = \"one\""));
    bench.refuses(&[], &["`trainer.steps`", "recipe.toml:13:9"]);
    bench.home.write("recipe.toml", recipe.replace("[trainer]", "[trainer"));
    bench.refuses(&[], &["recipe.toml:12"]);
    bench.home.write("recipe.toml", &recipe);
    bench.refuses(&["rollout.temperature=0"], &["`rollout.temperature` is 0; it must be above 0", "--set"]);
    bench.home.rlrun(&["missing.toml"]).refused(&["missing.toml"]);
}
