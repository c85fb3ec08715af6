//! Episodes in environments, in whole runs: what is trained, counted, written down and refused.

use serde_json::Value;

use crate::support::{CORRECT, Home, Moment, Run, tiny_model};

/// A chat template that describes tools as Qwen's does.
const TEMPLATE: &str = "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}call as <tool_call>\n{% endif %}\
                        {% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";

/// One step of a model that chats, with tools.
const CHAT: &str = r#"
[model]
path = "chat"
[data]
train = "tasks.jsonl"
eval = "tasks.jsonl"
chat = true
max_prompt_length = 700
[environment]
kind = "tools"
max_turns = 2
[[environment.tools]]
kind = "calculator"
[rollout]
group_size = 2
max_completion_length = 6
[[rewards]]
kind = "regex"
pattern = "[0-4]"
[eval]
correct.reward = "regex"
[buffer]
batch_groups = 2
[trainer]
steps = 1
microbatch_tokens = 1024
"#;

/// An environment with a reward for every turn, and no other reward.
const PLAYED: &str = r#"
[model.random]
[data]
train = "tasks.jsonl"
max_prompt_length = 16
[environment]
kind = "python"
path = "letters.py"
max_turns = 3
max_tokens = 64
[rollout]
group_size = 4
max_completion_length = 4
[buffer]
batch_groups = 2
[trainer]
steps = 3
microbatch_tokens = 256
[log]
samples = 2
"#;

const LETTERS: &str = "
class Letters:
    def reset(self, row):
        self.left = int(row['answer'])
        return ''

    def step(self, text):
        self.left -= 1
        vowels = sum(letter in 'aeiou' for letter in text)
        return f'<{self.left}>', float(vowels), self.left == 0
";

const TASKS: &str = "{\"prompt\": \"ab\", \"answer\": \"2\"}\n{\"prompt\": \"cd\", \"answer\": \"5\"}\n";

fn mean(run: &Run, name: &str) -> f64 {
    let values = run.values(name);
    values.iter().sum::<f64>() / values.len() as f64
}

/// A model with a chat template.
fn chat_model(home: &Home) {
    tiny_model(&home.path("chat"), 1024);
    home.write("chat/chat_template.jinja", TEMPLATE);
    home.write("tasks.jsonl", TASKS);
    home.write("chat.toml", CHAT);
}

#[test]
fn a_wrong_answer_is_followed_by_another_turn() {
    let home = Home::new();
    let sets = [
        "environment.kind=retry",
        "environment.max_turns=3",
        "environment.hint= no:",
        "environment.max_tokens=60",
        "trainer.steps=4",
        "eval.interval=2",
        "checkpoint.interval=2",
    ];
    let run = home.small("run", &sets);
    let turns = mean(&run, "environment/turns");
    assert!(turns > 1.0 && turns <= 3.0, "{turns} turns");
    let stops: f64 = ["done", "max_turns", "max_tokens", "context_full"]
        .iter()
        .map(|stop| mean(&run, &format!("environment/stop/{stop}")))
        .sum();
    assert!((stops - 1.0).abs() < 1e-9, "every episode ends for one reason: {stops}");
    assert!(run.values("environment/failed").iter().all(|failed| *failed == 0.0));
    let evaluated = run.metrics().into_iter().find_map(|line| line.get("eval/environment/turns")?.as_f64());
    assert!(evaluated.is_some_and(|turns| (1.0..=3.0).contains(&turns)), "{evaluated:?}");
    let sampled: Vec<Value> = (1..=4)
        .flat_map(|step| run.samples(step))
        .flat_map(|group| group["trajectories"].as_array().unwrap().clone())
        .collect();
    let longer =
        sampled.iter().filter(|trajectory| trajectory["turns"].as_array().is_some_and(|t| t.len() > 1));
    let texts: Vec<&str> = longer.map(|trajectory| trajectory["completion"].as_str().unwrap()).collect();
    assert!(!texts.is_empty() && texts.iter().all(|text| text.contains("[user] no:")), "{:?}", texts.first());
    home.rlrun(&["resume", "run", "--set", "trainer.steps=5"]).ok();
    assert_eq!(run.steps().len(), 5);
}

#[test]
fn tools_are_described_by_the_chat_template_and_called_in_its_form() {
    let home = Home::new();
    chat_model(&home);
    let checked = home.rlrun(&["check", "chat.toml"]).ok().stdout;
    assert!(checked.contains("environment `tools`: calculator; calls are in the form `hermes`"), "{checked}");
    assert!(checked.contains("renders past turns as they were"), "{checked}");
    let described: usize = longest_prompt(&checked);
    let plain = home.rlrun(&["check", "chat.toml", "--set", "environment.describe_tools=false"]).ok().stdout;
    assert!(longest_prompt(&plain) + 200 < described, "{described} tokens describe the tools");
    home.rlrun(&["chat.toml", "--run-dir", "run"]).ok();
    let run = home.run("run");
    assert_eq!(run.values("environment/tool_calls"), [0.0], "a random model calls nothing");
    assert_eq!(run.values("environment/turns"), [1.0]);
    assert_eq!(run.values("environment/stop/max_tokens"), [1.0], "it does not end within 6 tokens");
    home.write(
        "chat/chat_template.jinja",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    );
    let checked = home.rlrun(&["check", "chat.toml", "--set", "data.max_prompt_length=900"]).ok().stdout;
    assert!(checked.contains("in the form `json`"), "{checked}");
    let forgetful = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if not loop.last else m.content }}\
                     {% endfor %}";
    home.write("chat/chat_template.jinja", forgetful);
    let forgets = home.rlrun(&["check", "chat.toml", "--set", "data.max_prompt_length=900"]).ok().stdout;
    assert!(forgets.contains("the chat template changes past turns"), "{forgets}");
    assert!(
        longest_prompt(&checked) > longest_prompt(&plain) + 200,
        "the system message describes the tools"
    );
}

/// From the last line of `rlrun check`.
fn longest_prompt(checked: &str) -> usize {
    let (_, tokens) = checked.rsplit_once("longest prompt").unwrap();
    tokens.trim().split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn an_environment_in_python_gives_all_rewards() {
    let home = Home::new();
    if !python_is_recent() {
        return;
    }
    home.write("tasks.jsonl", TASKS);
    home.write("letters.py", LETTERS);
    home.write("played.toml", PLAYED);
    home.rlrun(&["played.toml", "--run-dir", "run"]).ok();
    let run = home.run("run");
    assert_eq!(run.steps().len(), 3);
    for group in (1..=3).flat_map(|step| run.samples(step)) {
        for trajectory in group["trajectories"].as_array().unwrap() {
            let Some(turns) = trajectory["turns"].as_array() else { continue };
            let rewards: f64 = turns.iter().filter_map(|turn| turn["reward"].as_f64()).sum();
            assert_eq!(trajectory["reward"].as_f64(), Some(rewards), "{trajectory}");
        }
    }
    let processes = ["played.toml", "--run-dir", "processes", "--set", "placement.processes=true"];
    home.rlrun(&processes).ok();
    let metrics = home.run("processes").steps();
    assert!(
        metrics.len() == 3 && metrics.iter().all(|line| line["environment/turns"].is_number()),
        "{metrics:?}"
    );
    let evaluated = home.rlrun(&["check", "played.toml", "--set", "environment.path=nothing.py"]);
    evaluated.refused(&["nothing.py", "environment.path"]);
}

#[test]
fn failures_of_an_environment_are_counted_by_kind() {
    let home = Home::new();
    if !python_is_recent() {
        return;
    }
    home.write("tasks.jsonl", TASKS);
    let raises = "        if text:\n            raise ValueError(text)\n";
    home.write(
        "letters.py",
        LETTERS.replace("        self.left -= 1\n", &format!("{raises}        self.left -= 1\n")),
    );
    // Completions of the random model end soon at one of these.
    let stops = "max_completion_length = 4\nstop = [\"a\", \"e\", \"i\", \"o\", \"n\", \"r\", \"s\", \"t\", \"1\", \"3\", \"5\", \"7\"]";
    home.write("played.toml", PLAYED.replace("max_completion_length = 4", stops));
    home.rlrun(&["played.toml", "--run-dir", "run"]).ok();
    let run = home.run("run");
    let failed = run.values("environment/failed");
    assert!(failed.iter().sum::<f64>() > 0.0, "{failed:?}");
    assert_eq!(run.values("environment/failed/error"), failed);
    for kind in ["turn_timeout", "episode_timeout", "none_free"] {
        assert_eq!(run.values(&format!("environment/failed/{kind}")), vec![0.0; failed.len()]);
    }
}

fn python_is_recent() -> bool {
    let recent = ["-c", "import sys; sys.exit(sys.version_info < (3, 9))"];
    let found = std::process::Command::new("python3").args(recent).status().is_ok_and(|s| s.success());
    if !found {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
    }
    found
}

#[test]
fn mistakes_in_an_environment_are_named() {
    let home = Home::new();
    chat_model(&home);
    let refused = |sets: &[&str], evidence: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["check", "chat.toml"].into_iter().chain(sets).collect();
        home.rlrun(&args).refused(evidence);
    };
    refused(&["environment.kind=tool"], &["no environment of kind \"tool\"", "did you mean \"tools\""]);
    refused(&["environment.hint=x"], &["does not take `hint`", "`format`"]);
    refused(&["environment.tools[0].kind=browser"], &["environment.tools[0].kind", "`code` and `mcp`"]);
    refused(&["environment.max_turns=0"], &["must be 1 or more"]);
    refused(&["environment.max_tokens=5"], &["no space for a prompt and a completion of 6 tokens"]);
    refused(&["environment.turn_timeout_s=700"], &["longer than `deadlines.wait_s`, 600"]);
    refused(&["environment.tool_timeout_s=601"], &["longer than `environment.turn_timeout_s`, 600"]);
    refused(&["data.chat=false"], &["environment.describe_tools", "set `data.chat = true`"]);
    let named = "{\"prompt\": \"ab\", \"answer\": \"2\", \"environment\": \"short\"}\n";
    home.write("named.jsonl", format!("{TASKS}{named}{}", named.replace("short", "chess")));
    let short = "environment.named.short.max_turns=1";
    let evidence = ["named.jsonl, row 4", "`environment` of task 3 is \"chess\"", "names `short`"];
    refused(&["data.train=named.jsonl", short], &evidence);
    refused(&["data.eval=named.jsonl", short], &evidence);
    let sets = ["--set", "environment.kind=tools", "--set", CORRECT];
    let args: Vec<&str> = ["check", "small.toml"].into_iter().chain(sets).collect();
    home.rlrun(&args).refused(&["environment.tools", "[[environment.tools]]"]);
}

/// A game in two roles, without data and without rewards of the recipe.
const SELF_PLAY: &str = r#"
[model.random]
hidden_size = 16
num_heads = 2
num_kv_heads = 2
[data]
max_prompt_length = 80
[data.seeds]
train_tasks = 40
eval_tasks = 6
[environment]
kind = "tic_tac_toe"
max_turns = 9
max_tokens = 192
parameters = { opening_moves = 2 }
[environment.named.random]
parameters = { opponent = "random" }
[warmup]
steps = 80
batch_tasks = 16
wrong_share = 0.3
[rollout]
group_size = 4
max_completion_length = 3
[buffer]
batch_groups = 2
[trainer]
steps = 4
microbatch_tokens = 1024
[eval]
interval = 2
[[eval.sets]]
name = "random"
environment = "random"
[checkpoint]
interval = 2
[log]
samples = 2
"#;

#[test]
fn a_game_against_itself_trains_both_roles_and_is_evaluated_against_others() {
    let home = Home::new();
    home.write("game.toml", SELF_PLAY);
    let checked = home.rlrun(&["check", "game.toml"]).ok().stdout;
    for said in
        ["the policy plays both sides, as roles `x` and `o`", "\"random\": `tic_tac_toe`: against a random"]
    {
        assert!(checked.contains(said), "{checked}");
    }
    for played in ["a scripted episode: ", "a scripted episode in `random`: "] {
        let line = checked.lines().find(|line| line.starts_with(played));
        assert!(line.is_some_and(|line| line.ends_with("ended by done")), "{checked}");
    }
    home.rlrun(&["game.toml", "--run-dir", "run"]).ok();
    let run = home.run("run");
    assert_eq!(run.steps().len(), 4);
    for group in (1..=4).flat_map(|step| run.samples(step)) {
        let trajectories = group["trajectories"].as_array().unwrap();
        let roles: Vec<&str> = trajectories.iter().map(|t| t["role"].as_str().unwrap()).collect();
        assert_eq!(roles, [["x"; 4], ["o"; 4]].concat());
        for (x, o) in trajectories[..4].iter().zip(&trajectories[4..]) {
            let rewards = [&x["reward"], &o["reward"]].map(|reward| reward.as_f64().unwrap());
            assert!(rewards.iter().sum::<f64>() <= 0.0 && rewards.iter().all(|reward| reward.abs() <= 1.0));
        }
    }
    assert_eq!((run.values("reward/role/x").len(), run.values("reward/role/o").len()), (4, 4));
    let ends = ["won", "drawn", "lost", "illegal"].map(|end| format!("environment/{end}"));
    let evaluated: Vec<Value> = run
        .metrics()
        .into_iter()
        .map(Value::Object)
        .filter(|line| line.get("eval/random/reward").is_some())
        .collect();
    assert_eq!(evaluated.len(), 3);
    for line in &evaluated {
        for set in ["", "random/"] {
            let shares: f64 =
                ends.iter().map(|end| line[&format!("eval/{set}{end}")].as_f64().unwrap()).sum();
            // A completion that is cut off ends a game without a result.
            let cut = line[&format!("eval/{set}environment/stop/max_tokens")].as_f64().unwrap();
            assert!((shares + cut - 1.0).abs() < 1e-9, "{line}");
        }
    }
    home.rlrun(&["resume", "run", "--set", "trainer.steps=6"]).ok();
    assert_eq!(run.steps().len(), 6);
    let played = home.rlrun(&["generate", "run", "7"]).ok().stdout;
    assert!(played.contains("[x] ") && played.contains("[o] ") && played.contains("ended by "), "{played}");
    let chat =
        home.rlrun_reading("3\n7\n", &["generate", "run", "--interactive", "--temperature", "0"]).ok().stdout;
    let (games, rest) = chat.rsplit_once("> ").unwrap();
    let games: Vec<&str> = games.split("> [x] ").skip(1).collect();
    assert!(rest.is_empty() && games.len() == 2, "{chat}");
    for (game, task) in games.iter().zip(["3", "7"]) {
        assert!(game.contains("[o] "), "{chat}");
        let alone = home.rlrun(&["generate", "run", task, "--temperature", "0"]).ok().stdout;
        assert_eq!(
            format!("[x] {}", game.trim_end()),
            alone.trim_end(),
            "each line is an episode of its own"
        );
    }
}

/// Episodes that a kill ends in their middle begin again; nothing that was acknowledged is lost or trained on twice.
#[test]
fn a_run_goes_on_after_a_kill_in_the_middle_of_episodes() {
    let home = Home::new();
    home.write("game.toml", SELF_PLAY);
    let endless =
        ["game.toml", "--run-dir", "run", "-q", "--set", "trainer.steps=100000", "--set", "eval.interval=0"];
    let mut running = home.start(&endless);
    assert!(home.run("run").wait_for(Moment::Checkpoint(2), &mut running));
    running.kill().unwrap();
    running.wait().unwrap();
    let reached = home.run("run").steps().len();
    let steps = format!("trainer.steps={}", reached + 3);
    home.rlrun(&["resume", "run", "--set", &steps]).ok();
    let steps: Vec<u64> = home.run("run").steps().iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=reached as u64 + 3).collect::<Vec<_>>());
}

/// The warm-up shows the calculator, and a call costs what the recipe says.
#[test]
fn a_warm_up_shows_tools_and_a_call_is_worth_what_the_recipe_says() {
    let home = Home::new();
    let recipe = crate::support::repository().join("recipes/tools_calculator.toml");
    let sets = [
        "warmup.steps=150",
        "warmup.batch_tasks=16",
        "warmup.wrong_share=0.5",
        "trainer.steps=2",
        "data.arithmetic.eval_tasks=8",
        "log.samples=2",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> = [recipe.to_str().unwrap(), "--run-dir", "run"].into_iter().chain(sets).collect();
    home.rlrun(&args).ok();
    let run = home.run("run");
    let calls = run.values("environment/tool_calls");
    assert!(calls.iter().all(|calls| (0.05..0.95).contains(calls)), "{calls:?}");
    for trajectory in run.samples(2).iter().flat_map(|group| group["trajectories"].as_array().unwrap()) {
        let correct = trajectory["components"][0]["value"].as_f64().unwrap();
        let called = trajectory["components"][1]["details"]["tool_calls"].as_f64().unwrap();
        let reward = trajectory["reward"].as_f64().unwrap();
        assert!((reward - (correct - 0.2 * called)).abs() < 1e-9, "{trajectory}");
    }
}

#[test]
fn mistakes_in_named_environments_and_seeds_are_named() {
    let home = Home::new();
    home.write("game.toml", SELF_PLAY);
    let refused = |sets: &[&str], evidence: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["check", "game.toml"].into_iter().chain(sets).collect();
        home.rlrun(&args).refused(evidence);
    };
    refused(
        &["environment.parameters.opponent=\"friend\""],
        &["parameters.opponent", "self, random, perfect"],
    );
    refused(
        &["environment.named.random.kind=\"chess\""],
        &["environment.named.random.kind", "no environment of kind"],
    );
    refused(&["environment.named.random.turns=3"], &["environment.named.random", "unknown field `turns`"]);
    refused(
        &["eval.sets[0].environment=\"perfect\""],
        &["no environment named \"perfect\"", "[environment.named.perfect]"],
    );
    refused(&["environment.discount=1.5"], &["environment.discount"]);
    refused(&["data.prompt_column=\"x\""], &["has no effect on the generated tasks of `data.seeds`"]);
    home.write(
        "alone.toml",
        SELF_PLAY
            .replace("kind = \"tic_tac_toe\"", "kind = \"tools\"\ndescribe_tools = false")
            .replace("parameters = { opening_moves = 2 }\n", "")
            .replace("parameters = { opponent = \"random\" }\n", "")
            .replace(
                "[warmup]",
                "[[environment.tools]]\nkind = \"calculator\"\n[[rewards]]\nkind = \"exact\"\n[warmup]",
            ),
    );
    home.rlrun(&["check", "alone.toml", "--set", "warmup.steps=0"])
        .refused(&["has no prompt", "data.seeds.prompt"]);
    let without = SELF_PLAY.split("[environment]").next().unwrap();
    home.write("without.toml", format!("{without}[[rewards]]\nkind = \"length\"\n[trainer]\nsteps = 1\n"));
    home.rlrun(&["check", "without.toml"]).refused(&["`data.seeds` are tasks of an environment"]);
}
