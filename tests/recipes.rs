//! Every shipped recipe is valid, and models and datasets of a user run without code changes.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use model::ModelDirectory;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::support::{Home, Run, repository};

/// A chat template for the character tokenizer.
const CHAT_TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// Settings with which two steps of `grpo_gsm8k.toml` take seconds.
const SHORT: [&str; 8] = [
    "data.max_prompt_length=900",
    "rollout.max_completion_length=128",
    "rollout.group_size=4",
    "buffer.batch_groups=3",
    "trainer.steps=2",
    "trainer.learning_rate=1e-3",
    "eval.tasks=4",
    "model.path=\"chat_model\"",
];

/// Families whose exports generate: one of each kind of decoder.
const GENERATES: [&str; 4] = ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next"];

/// Makes a tiny random model with a chat template in `chat_model`, with the binary.
fn make_chat_model(home: &Home) {
    let sizes =
        ["model.random.hidden_size=16", "model.random.intermediate_size=32", "model.random.num_layers=1"];
    let rest = ["warmup.steps=0", "trainer.steps=1", "buffer.batch_groups=1", "data.max_prompt_length=1200"];
    let sets = [&sizes[..], &rest, &["trainer.microbatch_tokens=2048", "eval.tasks=1"]].concat();
    let model = home.small("made", &sets).path.join("model");
    std::fs::rename(model, home.path("chat_model")).unwrap();
    home.write("chat_model/chat_template.jinja", CHAT_TEMPLATE);
}

/// The first 64 rows of GSM8K as published, if the file is beside the repository.
fn gsm8k_rows() -> Option<Vec<String>> {
    let path = repository().join("../shared/data/gsm8k/train.jsonl");
    if !path.exists() {
        eprintln!("SKIPPED: there is no {}", path.display());
        return None;
    }
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Some(text.lines().take(64).map(str::to_owned).collect())
}

/// Writes `question` and `answer` of `rows` as a Parquet file.
fn write_parquet(path: &Path, rows: &[String]) {
    let schema = "message rows { REQUIRED BYTE_ARRAY question (UTF8); REQUIRED BYTE_ARRAY answer (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for name in ["question", "answer"] {
        let cell = |row: &String| {
            let row: serde_json::Value = serde_json::from_str(row).unwrap();
            ByteArray::from(row[name].as_str().unwrap())
        };
        let cells: Vec<_> = rows.iter().map(cell).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&cells, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn with_sets<'a>(command: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    command.iter().copied().chain(sets.iter().flat_map(|set| ["--set", set])).collect()
}

/// The weights after the last step; asserts that at least one step had a gradient.
fn trained(run: &Run, steps: u64) -> Vec<u8> {
    assert_eq!(run.steps().len() as u64, steps);
    assert!(run.values("optim/grad_norm").iter().any(|norm| *norm > 0.0), "{:?}", run.steps());
    std::fs::read(run.checkpoint(steps).join("model/model.safetensors")).unwrap()
}

#[test]
fn every_recipe_passes_check_and_plan() {
    let home = Home::new();
    make_chat_model(&home);
    home.write("tasks.jsonl", "{\"question\":\"1+1?\",\"answer\":\"1+1 = 2\\n#### 2\"}\n");
    home.write("agent.py", "def play(base_url, api_key, model, **parameters):\n    return 0.0\n");
    // The reward model that `reward_model_math.toml` writes into its working directory.
    let scorer = repository().join("model/tests/goldens/scorer_qwen2");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let to = format!("outputs/reward_model_math/checkpoints/step_000060/model/{file}");
        home.write(&to, std::fs::read(scorer.join(file)).unwrap());
    }
    let own = ["model.path=\"chat_model\"", "data.train=\"tasks.jsonl\"", "data.eval=\"tasks.jsonl\""];
    let mut checked = 0;
    for entry in std::fs::read_dir(repository().join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        // A recipe for a downloaded model is checked with a small one and a small context.
        let lengths = ["data.max_prompt_length=700", "rollout.max_completion_length=200"];
        let small = [&own[..], &lengths].concat();
        let sets: &[&str] = match &text {
            text if text.contains("[model]\n") => &small,
            // The agent of the recipe needs a package, which `tests/run` installs.
            text if text.contains("kind = \"agent\"") => &["environment.path=\"agent.py:play\""],
            _ => &[],
        };
        let recipe = path.to_str().unwrap();
        let shown = home.rlrun(&with_sets(&["check", recipe], sets)).ok().stdout;
        assert!(shown.contains("no mistakes found"), "{shown}");
        let plan = home.rlrun(&with_sets(&["plan", recipe], sets)).ok().stdout;
        let name = path.file_name().unwrap().to_str().unwrap();
        for part in [&format!("{name}:")[..], "# default", "\nrun ", "\nmemory", "\n  total "] {
            assert!(plan.contains(part), "`{part}` is missing in the plan of {name}:\n{plan}");
        }
        checked += 1;
    }
    assert!(checked >= 2, "{checked} recipes");
}

#[test]
fn templates_pass_check() {
    let home = Home::new();
    make_chat_model(&home);
    home.write("tasks.jsonl", "{\"question\":\"1+1?\",\"answer\":\"#### 2\"}\n");
    home.rlrun(&["init"]).ok();
    home.rlrun(&["check", "grpo_math.toml"]).ok();
    home.rlrun(&["init", "--template", "grpo-gsm8k", "mine.toml"]).ok();
    let sets = ["model.path=\"chat_model\"", "data.train=\"tasks.jsonl\"", "data.eval=\"tasks.jsonl\""];
    let short = ["rollout.max_completion_length=200"];
    home.rlrun(&with_sets(&["check", "mine.toml"], &[&sets[..], &short].concat())).ok();
}

/// Uses the published file, `../shared/data/gsm8k/train.jsonl` beside the repository; without the file it says so
/// and passes.
#[test]
fn gsm8k_as_published_trains_from_lines_and_from_parquet() {
    let Some(rows) = gsm8k_rows() else { return };
    let home = Home::new();
    make_chat_model(&home);
    home.write("rows.jsonl", rows.join("\n"));
    write_parquet(&home.path("rows.parquet"), &rows);
    let recipe = std::fs::read_to_string(repository().join("recipes/grpo_gsm8k.toml")).unwrap();
    // A random model solves no task, and learns nothing from the recipe's reward alone.
    home.write("recipe.toml", recipe + "[[rewards]]\nkind = \"length\"\ncache = 64\n");
    let run = |format: &str| {
        let (train, eval) = (format!("data.train=\"rows.{format}\""), format!("data.eval=\"rows.{format}\""));
        let sets = [&SHORT[..], &[&train, &eval, "buffer.max_staleness=0"]].concat();
        let command = ["recipe.toml", "--run-dir", format];
        home.rlrun(&with_sets(&command, &sets)).ok();
        home.run(format)
    };
    let (lines, parquet) = (run("jsonl"), run("parquet"));
    assert!(trained(&lines, 2) == trained(&parquet, 2), "the same rows give the same weights");
    for sample in lines.samples(1) {
        let question = sample["prompt"].as_str().unwrap();
        assert!(rows.iter().any(|row| row.contains(&serde_json::to_string(question).unwrap())), "{sample:?}");
    }
    let answer = home.rlrun(&["generate", "jsonl", "What is 1+1?", "--max-tokens", "8"]).ok().stdout;
    assert!(!answer.is_empty());
}

/// Directories as transformers wrote them (`model/tests/goldens`), with the character tokenizer, whose ids they have.
#[test]
fn models_of_every_family_train_on_columns_of_any_name() {
    let goldens = std::fs::read_dir(repository().join("model/tests/goldens"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let families: Vec<_> = goldens.filter(|path| path.join("golden.safetensors").exists()).collect();
    assert!(families.len() > 15, "{families:?}");
    for golden in families {
        let (home, family) = (Home::new(), golden.file_name().unwrap().to_string_lossy());
        for entry in std::fs::read_dir(&golden).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if !name.starts_with("golden.") {
                home.write(&format!("model/{name}"), std::fs::read(entry.path()).unwrap());
            }
        }
        home.write("model/tokenizer.json", model::characters().to_string());
        home.write("tasks.jsonl", "{\"Frage 1\":\"1+1=\",\"x\":{\"L\u{f6}sung\":2}}\n{\"Frage 1\":\"2+1=\",\"x\":{\"L\u{f6}sung\":3}}\n");
        let recipe = "[model]\npath = \"model\"\n[data]\ntrain = \"tasks.jsonl\"\nprompt_column = \"Frage 1\"\n\
                      answer_column = \"x.L\u{f6}sung\"\nmax_prompt_length = 16\n[rollout]\nmax_completion_length = 12\n\
                      [[rewards]]\nkind = \"regex\"\npattern = \"[0-4]\"\n[buffer]\nbatch_groups = 4\n\
                      [trainer]\nsteps = 1\nlearning_rate = 1e-3\n";
        home.write("recipe.toml", recipe);
        home.rlrun(&["recipe.toml", "--run-dir", "run"]).ok();
        let run = home.run("run");
        let weights = trained(&run, 1);
        let first = &run.samples(1)[0];
        let answer = if first["prompt"] == "1+1=" { "2" } else { "3" };
        assert_eq!(first["answer"], answer, "{family}");

        home.rlrun(&["export", "run", "--out", "out"]).ok();
        assert!(std::fs::read(home.path("out/model.safetensors")).unwrap() == weights, "{family}");
        let open = |name: &str| ModelDirectory::open(&home.path(name)).unwrap();
        let (given, exported) = (open("model"), open("out"));
        assert_eq!(given.config(), exported.config(), "{family}");
        let (before, after) = (given.load_parameters().unwrap(), exported.load_parameters().unwrap());
        let moved = before.values().iter().zip(after.values()).filter(|(a, b)| a != b).count();
        assert!(
            moved * 2 > before.values().len(),
            "{family}: {moved} of {} weights moved",
            before.values().len()
        );
        if GENERATES.contains(&&*family) {
            home.rlrun(&["generate", "out", "1+1=", "--max-tokens", "4"]).ok();
        }
    }
}

/// Conversations in TRL's format, without a prompt column and without a reward.
#[test]
fn conversations_train_without_a_reward() {
    let home = Home::new();
    make_chat_model(&home);
    let turn = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let lines = |row: &dyn Fn(usize) -> serde_json::Value| {
        (0..16).map(|n| row(n).to_string() + "\n").collect::<String>()
    };
    home.write("sft.jsonl", lines(&|n| {
        let (ask, more) = (turn("user", &format!("{n}?")), turn("user", "and?"));
        serde_json::json!({ "messages": [ask, turn("assistant", "even"), more, turn("assistant", "even")] })
    }));
    home.write(
        "pairs.jsonl",
        lines(&|n| {
            let ask = turn("user", &format!("{n}?"));
            let answered = |text: &str| serde_json::json!([ask, turn("assistant", text)]);
            serde_json::json!({ "chosen": answered("even"), "rejected": answered("odd") })
        }),
    );
    let recipe = |file: &str, kind: &str| {
        format!(
            "[model]\npath = \"chat_model\"\n[data]\ntrain = \"{file}\"\neval = \"{file}\"\nmax_prompt_length = 64\n[rollout]\n\
             max_completion_length = 16\n[trainer]\nsteps = 20\nlearning_rate = 1e-2\n[eval]\ninterval = 10\n[supervised]\n\
             batch = 8\nkind = \"{kind}\"\n"
        )
    };
    home.write("sft.toml", recipe("sft.jsonl", "sft"));
    home.write("dpo.toml", recipe("pairs.jsonl", "dpo"));
    for name in ["sft", "dpo"] {
        home.rlrun(&["check", &format!("{name}.toml")]).ok();
        home.rlrun(&[&format!("{name}.toml"), "--run-dir", name]).ok();
    }
    let measured = |run: &str, name: &str| -> Vec<f64> {
        home.run(run).metrics().iter().filter_map(|line| line.get(name)?.as_f64()).collect()
    };
    let losses = measured("sft", "eval/loss");
    assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
    assert_eq!(measured("dpo", "eval/pair_accuracy").last(), Some(&1.0));
    // The reference of an adapter over weights that stay as they are stored is what it was at the start.
    let adapted =
        ["dpo.toml", "--run-dir", "adapted", "--set", "lora.rank=8", "--set", "lora.quantized_base=true"];
    home.rlrun(&adapted).ok();
    assert_eq!(measured("adapted", "eval/pair_accuracy").last(), Some(&1.0));
    assert!((measured("adapted", "loss/mean")[0] - 2.0_f64.ln()).abs() < 1e-6);
    // Rows are validated before the run starts.
    home.write("sft.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"1?\"}]}\n");
    home.rlrun(&["check", "sft.toml"]).refused(&["sft.jsonl:1", "`messages`", "no assistant turn"]);
    home.write("pairs.jsonl", "{\"prompt\": \"1?\", \"chosen\": \"even\"}\n");
    home.rlrun(&["check", "dpo.toml"]).refused(&["task 0", "`rejected`"]);
}
