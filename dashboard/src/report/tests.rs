//! Reports of runs that the tests write.

use super::*;

const HOSTILE: &str = "</script><script>window.broken = 1</script><!-- <b>&\u{2028}";

/// A run with samples, tokens, timeline and status, whose texts pretend to be markup.
fn run(root: &std::path::Path, name: &str, steps: u64) -> PathBuf {
    let root = root.join(name);
    std::fs::create_dir_all(root.join("samples")).unwrap();
    let line = |step: u64| {
        format!(
            "{}\n",
            json!({"step": step, "time_s": step, "reward/mean": 0.125, "other/x": step, "time/step": 2.0, "bottleneck": HOSTILE})
        )
    };
    std::fs::write(root.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    std::fs::write(root.join("resolved.toml"), "[trainer]\nsteps = 3  # --set\n").unwrap();
    std::fs::write(root.join("run.json"), "{\"rlrun\":\"0.1.0\",\"host\":\"machine\"}").unwrap();
    std::fs::write(root.join("status.json"), json!({"step": 3, "roles": [HOSTILE]}).to_string()).unwrap();
    let span = json!({"lane": "trainer", "kind": "evaluate", "start": 0, "end": 1.5, "note": HOSTILE});
    std::fs::write(root.join("timeline.jsonl"), format!("{span}\n")).unwrap();
    for step in 1..=steps.min(40) {
        let group = json!({"group": step, "task": 1, "prompt": HOSTILE, "trajectories": [
            {"index": 0, "completion": HOSTILE, "reward": 1.0}, {"index": 1, "completion": "b", "reward": 0.0}]});
        let row =
            |index: u64| json!({"group": step, "index": index, "branch": 0, "texts": [HOSTILE]}).to_string();
        std::fs::write(root.join(format!("samples/step_{step:06}.jsonl")), format!("{group}\n")).unwrap();
        let rows = format!("{}\n{}\n", row(0), row(1));
        std::fs::write(root.join(format!("samples/step_{step:06}_tokens.jsonl")), rows).unwrap();
    }
    root
}

/// What the report has for the page.
fn data(html: &str) -> Value {
    let begin = "<script type=\"application/json\" id=\"report\">";
    let rest = &html[html.find(begin).unwrap() + begin.len()..];
    serde_json::from_str(&rest[..rest.find("</script>").unwrap()]).unwrap()
}

#[test]
fn a_report_has_what_the_files_have() {
    let directory = tempfile::tempdir().unwrap();
    let html = report(&[run(directory.path(), "a", 20), run(directory.path(), "b", 2)]).unwrap();
    let data = data(&html);
    assert_eq!(data["overview"]["runs"][0]["last"]["other/x"], 20.0);
    let curve = &data["curves"]["time"]["a"]["other/x"];
    assert_eq!((curve["x"].as_array().unwrap().len(), &curve["y"][19]), (20, &json!(20.0)));
    let a = &data["of_runs"]["a"];
    assert_eq!(a["steps"], json!([1, 4, 8, 12, 16, 20]));
    assert_eq!(a["samples"]["4"]["groups"][0]["prompt"], HOSTILE);
    assert_eq!(a["tokens"]["20.20.1"]["rows"][0]["texts"][0], HOSTILE);
    assert_eq!((&a["recipe"][0]["value"], &a["about"]["facts"]["host"]), (&json!("3"), &json!("machine")));
    assert_eq!(a["about"]["timings"][0]["total_s"], 40.0);
    assert_eq!(a["timeline"]["whole"]["lanes"][0]["spans"][0]["note"], HOSTILE);
    assert_eq!(a["status"]["status"]["roles"][0], HOSTILE);
    assert_eq!(a["history"]["remarks"].as_array().unwrap().len(), 20);
    assert_eq!(data["of_runs"]["b"]["steps"], json!([1, 2]));
}

#[test]
fn no_text_of_a_run_leaves_its_json() {
    let directory = tempfile::tempdir().unwrap();
    let html = report(&[run(directory.path(), "<b>&", 3)]).unwrap();
    assert_eq!(html.matches("</script>").count(), 3, "the data, the curves' library, the page");
    assert!(!html.contains("<script>window") && !html.contains("<b>&") && !html.contains('\u{2028}'));
    let nonces: Vec<&str> = html.split("nonce=\"").skip(1).map(|rest| &rest[..32]).collect();
    assert_eq!(nonces.len(), 4);
    assert!(nonces.iter().all(|nonce| *nonce == nonces[0] && nonce.bytes().all(|b| b.is_ascii_hexdigit())));
    assert!(html.contains(&format!("script-src 'nonce-{}'", nonces[0])));
    assert!(
        !report(&[run(directory.path(), "c", 1)]).unwrap().contains(nonces[0]),
        "another file has another"
    );
}

#[test]
fn a_report_is_bounded_whatever_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let root = run(directory.path(), "long", 1);
    let metrics: Vec<String> = (0..4000).map(|index| format!("\"metric/{index}\":{index}.123456")).collect();
    let line = |step: usize| format!("{{\"step\":{step},\"time_s\":{step}.5,{}}}\n", metrics.join(","));
    std::fs::write(root.join("metrics.jsonl"), (0..100).map(line).collect::<String>()).unwrap();
    // Every byte of these texts takes six.
    let text = "<".repeat(90_000);
    for step in 1..=30 {
        let trajectories: Vec<Value> =
            (0..8).map(|index| json!({"index": index, "completion": text, "reward": 1})).collect();
        let group = json!({"group": 1, "task": 1, "trajectories": trajectories});
        std::fs::write(root.join(format!("samples/step_{step:06}.jsonl")), format!("{group}\n")).unwrap();
        let row = json!({"group": 1, "index": 0, "texts": vec!["<<<<<<<<"; 8192]});
        std::fs::write(
            root.join(format!("samples/step_{step:06}_tokens.jsonl")),
            format!("{row}\n").repeat(20),
        )
        .unwrap();
    }
    let html = report(&[root.clone(), root.clone(), root]).unwrap();
    assert!(html.len() <= MAX_REPORT_BYTES, "{} bytes", html.len());
    let data = data(&html);
    // The metrics of the first screen are there, and at least a part of everything.
    assert!(data["curves"]["step"]["long (3)"].as_object().unwrap().len() > 1000);
    assert!(!data["of_runs"]["long (3)"]["recipe"].as_array().unwrap().is_empty());
    let page =
        std::fs::read_dir("page").unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
    assert!((page as usize) < PAGE_BYTES);
}

#[test]
fn very_many_metrics_are_bounded_too() {
    let directory = tempfile::tempdir().unwrap();
    let roots: Vec<PathBuf> =
        (0..MAX_RUNS).map(|index| run(directory.path(), &index.to_string(), 1)).collect();
    for (index, root) in roots.iter().enumerate() {
        // Every byte of a name takes six, and every run has names of its own.
        let name = |metric: usize| format!("\"{}{index}/{metric}\":1", "<".repeat(180));
        let metrics: Vec<String> = (0..1000).map(name).collect();
        let line = format!("{{\"step\":1,\"reward/mean\":0.5,{}}}\n", metrics.join(","));
        std::fs::write(root.join("metrics.jsonl"), line).unwrap();
    }
    let html = report(&roots).unwrap();
    assert!(html.len() <= MAX_REPORT_BYTES, "{} bytes", html.len());
    let data = data(&html);
    assert_eq!(data["curves"]["step"]["63"]["reward/mean"]["y"], json!([0.5]));
    assert_eq!(data["overview"]["runs"][63]["last"]["reward/mean"], 0.5);
}

#[test]
fn what_is_no_run_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = report(&[directory.path().to_owned()]).unwrap_err();
    assert!(error.to_string().contains("is no run directory"), "{error}");
    let many = vec![run(directory.path(), "a", 1); MAX_RUNS + 1];
    assert!(matches!(report(&many), Err(ReportError::TooManyRuns { given: 65, most: 64 })));
}
