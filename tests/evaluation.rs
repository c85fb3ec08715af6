//! Evaluations: the definition of correct, several sets and samples, rewards that fail or hang.

use std::time::{Duration, Instant};

use crate::support::{Done, Home, finish, interrupt};

/// Longest time from an interrupt to the end of a process on a busy machine.
const PROMPTLY: Duration = Duration::from_secs(60);

/// A run of one step whose reward is the function in `reward.py`.
fn with_function(home: &Home, function: &str, keys: &str) {
    home.write("reward.py", function);
    let rewards = "[[rewards]]\nkind = \"python\"\nname = \"mine\"\npath = \"reward.py\"\ntimeout_s = 300\n";
    let rest = "[eval.correct]\nreward = \"mine\"\n[deadlines]\nquiet_s = 0.5\n[warmup]\nsteps = 1\n[trainer]\nsteps = 1\n";
    home.write("run.toml", format!("extends = \"small.toml\"\n{rewards}{rest}{keys}"));
}

/// Interrupts the process and asserts that it ends in time.
fn ends_promptly(child: crate::support::Running) -> Done {
    interrupt(&child);
    let asked = Instant::now();
    let done = finish(child).ok();
    assert!(asked.elapsed() < PROMPTLY, "it took {:?}\n{}", asked.elapsed(), done.stdout);
    done
}

#[test]
fn a_reward_that_hangs_in_the_first_evaluation_is_named_and_interrupted() {
    let home = Home::new();
    with_function(&home, "import time\ndef reward(completions, **kwargs):\n    time.sleep(1000)\n", "");
    let run = home.run("run");
    let mut child = home.start(&["run.toml", "--run-dir", "run"]);
    run.wait_to_show("the trainer evaluates v0: of 20 answers 20 are generated and 0 judged", &mut child);
    run.wait_to_show("reward `mine` judges ", &mut child);
    let done = ends_promptly(child);
    assert!(done.stdout.contains("go on with: rlrun resume run"), "{}\n{}", done.stdout, done.stderr);
    assert!(done.stdout.contains("no progress for "), "{}", done.stdout);
    assert!(!run.path.join("metrics.jsonl").exists(), "nothing was measured");
    with_function(&home, "def reward(completions, **kwargs):\n    return [1.0 for _ in completions]\n", "");
    home.rlrun(&["resume", "run"]).ok();
    let accuracy: Vec<_> = run.metrics().iter().map(|line| line["eval/accuracy"].clone()).collect();
    assert_eq!(accuracy, [1, 1]);
}

/// The second evaluation hangs: all steps are done and the last accuracy is missing.
#[test]
fn a_resume_repeats_an_interrupted_last_evaluation() {
    let home = Home::new();
    let at = |name: &str| format!("{:?}", home.path(name));
    let function = format!(
        "import os, time\ndef reward(completions, test=None, **kwargs):\n    if test is not None:\n        \
         if os.path.exists({seen}) and not os.path.exists({go}):\n            time.sleep(1000)\n        \
         open({seen}, 'w').close()\n    return [0.5 for _ in completions]\n",
        seen = at("seen"),
        go = at("go"),
    );
    home.write("test.jsonl", "{\"prompt\": \"1+1=\", \"answer\": \"2\", \"test\": true}\n");
    let keys = "[data.arithmetic]\neval_tasks = 0\n[[eval.sets]]\nname = \"test\"\npath = \"test.jsonl\"\n";
    with_function(&home, &function, keys);
    let run = home.run("run");
    let mut child = home.start(&["run.toml", "--run-dir", "run"]);
    run.wait_to_show("the trainer evaluates v1: of 1 answers 1 are generated and 0 judged", &mut child);
    let done = ends_promptly(child);
    assert!(done.stdout.contains("go on with: rlrun resume run"), "{}", done.stdout);
    assert!(run.checkpoint(1).is_dir());
    let there =
        || run.metrics().iter().map(|line| line.contains_key("eval/test/accuracy")).collect::<Vec<_>>();
    assert_eq!(there(), [true, false]);
    home.write("go", "");
    let done = home.rlrun(&["resume", "run"]).ok();
    assert!(done.stdout.contains("accuracy 0.000 -> 0.000 in 1 steps"), "{}", done.stdout);
    assert_eq!(there(), [true, false, true]);
    home.rlrun(&["resume", "run"]).ok();
    assert_eq!(there(), [true, false, true], "measured once");
}

#[test]
fn failures_count_as_wrong_and_an_evaluation_without_a_verdict_is_an_error() {
    let home = Home::new();
    // Fails where the sum begins with an odd digit, and gives the others 2.
    let function = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    \
                    if int(ground_truth[0]) % 2:\n        raise ValueError('odd')\n    return 2.0\n";
    with_function(&home, function, "weight = 0.25\n");
    with_function(&home, function, "");
    let done = home.rlrun(&["run.toml", "--run-dir", "run", "--set", "rewards_fail=0"]);
    assert_eq!(done.status.code(), Some(2));
    let done = home.rlrun(&["run.toml", "--run-dir", "run"]).ok();
    let first = &home.run("run").metrics()[0];
    let number = |name: &str| first[name].as_f64().unwrap();
    let failed = number("eval/failed");
    assert!(failed > 0.0 && failed < 20.0, "{first:?}");
    assert!((number("eval/accuracy") - (20.0 - failed) / 20.0).abs() < 1e-9, "{first:?}");
    assert_eq!(number("eval/reward"), 2.0);
    let said = format!("evaluation: reward `mine` failed for {failed} of 20 answers, which count as wrong");
    assert!(done.stdout.contains(&said), "{}", done.stdout);
    with_function(&home, "def reward(completions, **kwargs):\n    raise ValueError('never')\n", "");
    let done = home.rlrun(&["eval", "run", "--recipe", "run.toml"]);
    assert_eq!(done.status.code(), Some(1), "{}\n{}", done.stdout, done.stderr);
    for evidence in ["accuracy 0, because reward `mine` could judge none of 20 answers", "never"] {
        assert!(done.stderr.contains(evidence), "{}", done.stderr);
    }
}

#[test]
fn sets_and_samples_have_separate_metrics() {
    let home = Home::new();
    home.write(
        "test.jsonl",
        "{\"prompt\": \"1+1=\", \"sum\": \"2\"}\n{\"prompt\": \"2+2=\", \"sum\": \"4\"}\n",
    );
    let rewards =
        "[[rewards]]\nkind = \"format\"\nweight = 0.1\n[[rewards]]\nkind = \"math\"\nweight = 0.5\n";
    let sets =
        "[[eval.sets]]\nname = \"tiny\"\npath = \"test.jsonl\"\nanswer_column = \"sum\"\nsamples = 2\n";
    let rest = "[eval]\ntemperature = 1.0\n[trainer]\nsteps = 1\n";
    home.write("run.toml", format!("extends = \"small.toml\"\n{rewards}{rest}{sets}"));
    let checked = home.rlrun(&["check", "run.toml"]).ok();
    assert!(
        checked.stdout.contains("correct: answers for which reward `math` is at least 1"),
        "{}",
        checked.stdout
    );
    assert!(checked.stdout.contains("22 held-out tasks"), "{}", checked.stdout);
    home.rlrun(&["run.toml", "--run-dir", "run"]).ok();
    for line in home.run("run").metrics() {
        let number = |name: &str| line[name].as_f64().unwrap();
        // The weight halves the reward and does not change what is correct.
        assert!((number("eval/reward") - 0.5 * number("eval/accuracy")).abs() < 0.101, "{line:?}");
        assert!(number("eval/accuracy_low") <= number("eval/accuracy"), "{line:?}");
        assert_eq!(number("eval/tiny/avg@2"), number("eval/tiny/accuracy"));
        assert!(number("eval/tiny/pass@2") >= number("eval/tiny/pass@1"), "{line:?}");
        assert!(!line.contains_key("eval/pass@1"), "{line:?}");
    }
    let args = ["eval", "run", "--recipe", "run.toml", "--samples", "4", "--tasks", "3"];
    let shown = home.rlrun(&[&args[..], &["--answers", "answers.jsonl"]].concat()).ok().stdout;
    for evidence in ["on 3 tasks, 4 answers each (95 % interval ", "avg@4 ", "pass@4 ", "\ntiny: accuracy "] {
        assert!(shown.contains(evidence), "{evidence}: {shown}");
    }
    let written = std::fs::read_to_string(home.path("answers.jsonl")).unwrap();
    let answers: Vec<serde_json::Value> =
        written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 3 * 4 + 2 * 2, "{written}");
    assert!(shown.contains(&format!(", {} tokens sampled", completion_tokens(&answers))), "{shown}");
    let correct =
        answers.iter().filter(|answer| answer["set"] == "default" && answer["correct"] == true).count();
    assert!(shown.starts_with(&format!("accuracy {:.4} on 3 tasks", correct as f64 / 12.0)), "{shown}");
    let nowhere = home.rlrun(&[&args[..], &["--answers", "missing/answers.jsonl"]].concat());
    assert!(
        nowhere.stderr.contains("cannot write the answers to missing/answers.jsonl"),
        "{}",
        nowhere.stderr
    );
    home.rlrun(&[&args[..], &["--temperature", "0"]].concat())
        .refused(&["which are all the same at temperature 0"]);
    let bare = "extends = \"small.toml\"\n[[rewards]]\nkind = \"format\"\n";
    home.write("bare.toml", bare);
    let checked = home.rlrun(&["check", "bare.toml"]).ok();
    assert!(
        checked.stdout.contains("no accuracy is measured: no reward is verifiable"),
        "{}",
        checked.stdout
    );
}

/// Number of tokens of the lines of `--answers`.
fn completion_tokens(answers: &[serde_json::Value]) -> usize {
    answers.iter().map(|answer| answer["completion_ids"].as_array().map_or(0, Vec::len)).sum()
}
