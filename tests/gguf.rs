//! Every command that takes a model takes a GGUF file, and does what it does with the directory that the file is exported to.

use std::fs;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as GgufValue;
use model::{Architecture, Config, Parameters, Sizes};

use crate::support::{Home, tiny_sizes};

#[path = "../model/tests/common/gguf.rs"]
mod content;

use content::GgufContent;

const CHAT_TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// The reference is the same file, so that it is read for every use, and the sampler is another process.
const RECIPE: &str = r#"
[model]
path = "chat.gguf"
[data]
train = "tasks.jsonl"
eval = "tasks.jsonl"
prompt_column = "question"
answer_column = "answer"
chat = true
max_prompt_length = 40
[rollout]
max_completion_length = 12
[[rewards]]
kind = "regex"
pattern = "[0-4]"
[algorithm]
kl_coef = 0.01
reference = "chat.gguf"
[buffer]
batch_groups = 4
[trainer]
steps = 2
learning_rate = 1e-3
[eval]
correct = { reward = "regex" }
[placement]
processes = true
rollout_workers = 1
"#;

/// A tiny Llama with the character tokenizer and a chat template, as `chat.gguf`.
fn home() -> Home {
    let config = Config::fresh(&Sizes {
        hidden_size: 64,
        intermediate_size: 64,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        ..tiny_sizes(128)
    })
    .of_family(Architecture::Llama);
    let parameters = Parameters::random(&Config { initializer_range: 0.3, ..config.clone() }, 5);
    let mut content = GgufContent::of(&config, &parameters, GgmlDType::Q8_0, (&model::characters(), "gpt-2"));
    content.set("tokenizer.chat_template", GgufValue::String(CHAT_TEMPLATE.to_owned()));
    let home = Home::new();
    content.write(&home.path("chat.gguf"));
    home.write("recipe.toml", RECIPE);
    home.write(
        "tasks.jsonl",
        "{\"question\":\"1+1=\",\"answer\":\"2\"}\n{\"question\":\"2+1=\",\"answer\":\"3\"}\n",
    );
    home
}

#[test]
fn every_command_takes_a_gguf_file() {
    let home = home();
    let checked = home.rlrun(&["check", "recipe.toml"]).ok().stdout;
    assert!(checked.contains("no mistakes found; 55872 parameters, 2 training tasks"), "{checked}");
    home.rlrun(&["export", "chat.gguf", "--out", "exported"]).ok();
    let directory = "model.path=\"exported\"";
    let total = |sets: &[&str]| {
        let shown = home.rlrun(&[&["plan", "recipe.toml"], sets].concat()).ok().stdout;
        shown.lines().find(|line| line.starts_with("  total ")).map(str::to_owned)
    };
    assert_eq!(total(&[]), total(&["--set", directory]));
    let answer =
        |model: &str| home.rlrun(&["generate", model, "1+1=", "2+1=", "--max-tokens", "16"]).ok().stdout;
    let answers = answer("chat.gguf");
    assert!(answers.trim().len() > 10, "{answers:?}");
    assert_eq!(answer("exported"), answers);

    home.rlrun(&["recipe.toml", "--run-dir", "run"]).ok();
    let run = home.run("run");
    assert_eq!(run.steps().len(), 2);
    // The reference is the model that the run started from.
    assert!(run.values("kl/ref")[0].abs() < 1e-5, "{:?}", run.steps());
    // Checkpoints are directories, and do without the file.
    fs::rename(home.path("chat.gguf"), home.path("moved.gguf")).unwrap();
    home.rlrun(&["generate", "run", "1+1=", "--max-tokens", "4"]).ok();
    home.rlrun(&["export", "run", "--out", "trained"]).ok();
    fs::rename(home.path("moved.gguf"), home.path("chat.gguf")).unwrap();
    home.rlrun(&["resume", "run", "--set", "trainer.steps=3"]).ok();
    assert_eq!(run.steps().len(), 3);
    home.rlrun(&["eval", "trained", "--recipe", "recipe.toml"]).ok();
    home.rlrun(&["eval", "chat.gguf", "--recipe", "recipe.toml"]).ok();
}

#[test]
fn an_adapter_of_a_gguf_file_names_a_directory() {
    let home = home();
    let one_process = RECIPE.split("[placement]").next().unwrap();
    home.write("adapter.toml", format!("{one_process}[lora]\nrank = 4\n"));
    home.rlrun(&["adapter.toml", "--run-dir", "run", "--set", "trainer.steps=1"]).ok();
    let shown = home.rlrun(&["export", "run", "--adapter", "--out", "adapter"]).ok().stdout;
    assert!(shown.contains("checkpoints/base"), "{shown}");
}

#[test]
fn a_damaged_file_is_an_error_of_the_input() {
    let home = home();
    let whole = fs::read(home.path("chat.gguf")).unwrap();
    home.write("chat.gguf", &whole[..whole.len() - 100]);
    for command in
        [&["check", "recipe.toml"][..], &["plan", "recipe.toml"], &["generate", "chat.gguf", "1+1="]]
    {
        home.rlrun(command).refused(&["chat.gguf", "cut off: fetch it again"]);
    }
    home.write("chat.gguf", "text");
    home.rlrun(&["check", "recipe.toml"]).refused(&["chat.gguf", "does not begin with `GGUF`"]);
}

/// The sampler computes what the trainer does, without any weights in f32, and a run needs nothing outside its directory.
#[test]
fn an_adapter_is_trained_over_a_file_that_stays_quantised() {
    let home = home();
    let without = RECIPE.split("[placement]").next().unwrap().replace("reference = \"chat.gguf\"\n", "");
    home.write("adapter.toml", format!("{without}[lora]\nrank = 4\nquantized_base = true\n"));
    home.rlrun(&["check", "adapter.toml"]).ok();
    let train = |run: &str, steps: &str| {
        let steps = format!("trainer.steps={steps}");
        let sets = ["buffer.max_staleness=0", "checkpoint.interval=1", &steps];
        let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
        home.rlrun(&[&["adapter.toml", "--run-dir", run], &sets[..]].concat()).ok();
    };
    train("whole", "4");
    let whole = home.run("whole");
    assert_eq!(whole.values("kl/mismatch"), [0.0; 4]);
    // The reference is the base with the adapter of the start, which adds nothing.
    let divergences = whole.values("kl/ref");
    assert_eq!(divergences[0], 0.0);
    assert!(divergences[1..].iter().all(|divergence| *divergence > 0.0), "{divergences:?}");
    train("half", "2");
    home.rlrun(&["resume", "half", "--set", "trainer.steps=4"]).ok();
    // Samplers get rounded factors, and so does a replay.
    let narrow = ["weights.dtype=bf16", "log.schedule=true", "trainer.steps=3"];
    let narrow: Vec<&str> = narrow.into_iter().flat_map(|set| ["--set", set]).collect();
    home.rlrun(&[&["adapter.toml", "--run-dir", "narrow"], &narrow[..]].concat()).ok();
    let replay = home.rlrun(&["replay", "narrow", "-q"]).ok();
    assert!(replay.stdout.contains("bit for bit: 3 steps"), "{}", replay.stdout);
    let shown = home.rlrun(&["export", "whole", "--adapter", "--out", "adapter"]).ok().stdout;
    assert!(shown.contains("chat.gguf"), "{shown}");
    fs::remove_file(home.path("chat.gguf")).unwrap();
    let adapter = |run: &str, step: u64| {
        let file = format!("{run}/checkpoints/step_{step:06}/adapter/adapter_model.safetensors");
        fs::read(home.path(&file)).unwrap()
    };
    assert!(adapter("whole", 4) == adapter("half", 4), "a resumed run has the same bits");
    assert!(adapter("whole", 4) != adapter("whole", 3), "the adapter is trained");
    assert!(!home.path("whole/checkpoints/step_000004/model/model.safetensors").exists());

    home.rlrun(&["export", "whole", "--out", "merged"]).ok();
    let answer =
        |model: &str| home.rlrun(&["generate", model, "1+1=", "2+1=", "--max-tokens", "16"]).ok().stdout;
    assert_eq!(answer("whole"), answer("merged"));
    let base = home.path("whole/checkpoints/base/model.gguf");
    let mut bytes = fs::read(&base).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&base, bytes).unwrap();
    let damaged = home.rlrun(&["generate", "whole", "1+1="]);
    assert!(
        !damaged.status.success() && damaged.stderr.contains("model.gguf is damaged"),
        "{}",
        damaged.stderr
    );
}

/// Ranks that are threads share the file, ranks that are processes receive it, and a device has its blocks.
#[test]
fn ranks_and_devices_train_an_adapter_over_a_file_that_stays_quantised() {
    let home = home();
    let without = RECIPE.split("[placement]").next().unwrap().replace("reference = \"chat.gguf\"\n", "");
    home.write("adapter.toml", format!("{without}[lora]\nrank = 4\nquantized_base = true\n"));
    let train = |run: &str, sets: &[&str]| {
        let all = ["buffer.max_staleness=0", "trainer.leaves=2", "trainer.steps=2"];
        let sets = all.iter().chain(sets).flat_map(|set| ["--set", set]);
        let command: Vec<&str> = ["adapter.toml", "--run-dir", run].into_iter().chain(sets).collect();
        home.rlrun(&command).ok();
        let run = home.run(run);
        (run.values("optim/grad_norm"), run.values("kl/mismatch"))
    };
    let (expected, _) = train("alone", &[]);
    let (threads, mismatch) = train("threads", &["trainer.world=2"]);
    assert_eq!((&threads, mismatch), (&expected, vec![0.0; 2]));
    // A sampler in a process of its own reads the file too.
    let all = ["trainer.world=2", "trainer.ranks=\"processes\"", "placement.processes=true"];
    let (processes, mismatch) = train("processes", &all);
    assert_eq!((processes, mismatch), (expected.clone(), vec![0.0; 2]));
    if cfg!(feature = "emulator") {
        let sets = ["placement.device=\"emulated\"", "placement.optimizer=\"host\""];
        let (found, mismatch) = train("device", &sets);
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-2 * expected, "{found}, not {expected}");
        }
        assert!(mismatch.iter().all(|mismatch| mismatch.abs() < 1e-4), "{mismatch:?}");
    }
}

/// The weights of a directory in bf16 stay so too.
#[test]
fn an_adapter_is_trained_over_a_directory_as_it_is_stored() {
    let home = home();
    let without = RECIPE.split("[placement]").next().unwrap();
    let without =
        without.replace("kl_coef = 0.01\nreference = \"chat.gguf\"\n", "").replace("chat.gguf", "narrow");
    home.write("adapter.toml", format!("{without}[lora]\nrank = 4\nquantized_base = true\n"));
    home.rlrun(&["export", "chat.gguf", "--out", "narrow", "--dtype", "bf16"]).ok();
    home.rlrun(&["adapter.toml", "--run-dir", "run", "--set", "buffer.max_staleness=0"]).ok();
    assert_eq!(home.run("run").values("kl/mismatch"), [0.0; 2]);
    let file = |path: &str| fs::read(home.path(path)).unwrap();
    assert!(file("run/checkpoints/base/model.safetensors") == file("narrow/model.safetensors"));
    let plan = |set: &str| home.rlrun(&["plan", "adapter.toml", "--set", set]).ok().stdout;
    assert!(plan("lora.quantized_base=true").contains("A and B\n"));
    assert!(plan("lora.quantized_base=false").contains("the frozen weights under them"));
    home.rlrun(&["eval", "run", "--recipe", "adapter.toml"]).ok();
}

#[test]
fn what_needs_the_weights_in_f32_is_refused_over_a_file_that_stays_quantised() {
    let home = home();
    home.write("adapter.toml", format!("{RECIPE}[lora]\nrank = 4\nquantized_base = true\n"));
    home.rlrun(&["plan", "adapter.toml", "--set", "rollout.quantization=\"int8\""])
        .refused(&["quantization", "the weights stay as their files store them"]);
}
