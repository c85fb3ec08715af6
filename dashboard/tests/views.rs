//! Timeline, tokens, comparison, status and environment over HTTP.

use serde_json::json;

use crate::{ServedPage, append, run_with};

const HOSTILE: &str = "<script>alert(1)</script>";

#[test]
fn new_spans_are_announced_and_a_cut_file_begins_again() {
    let run = run_with("");
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let span = |start: u64| {
        format!(
            "{{\"lane\":\"trainer\",\"kind\":\"{HOSTILE}\",\"start\":{start},\"end\":{},\"step\":{start}}}\n",
            start + 1
        )
    };
    append(run.path(), "timeline.jsonl", &span(0));
    let page = ServedPage::of(&[run.path()]);
    let mut stream = page.stream();
    let timeline = |query: &str| page.get(&format!("/api/timeline?run={name}{query}")).json();
    assert_eq!(timeline("")["lanes"][0]["spans"][0]["kind"], HOSTILE);
    append(run.path(), "timeline.jsonl", &span(1));
    while timeline("")["last"] != 2.0 {
        crate::client::next_event(&mut stream);
    }
    assert_eq!(timeline("&from=1.5&to=9")["lanes"][0]["spans"].as_array().unwrap().len(), 1);
    std::fs::write(run.path().join("timeline.jsonl"), span(5)).unwrap();
    while timeline("")["first"] != 5.0 {
        crate::client::next_event(&mut stream);
    }
    for bad in ["&from=x", "&pixels=-1"] {
        assert_eq!(page.get(&format!("/api/timeline?run={name}{bad}")).status, 400, "{bad}");
    }
    assert_eq!(page.get("/api/timeline?run=none").status, 404);
}

#[test]
fn tokens_filters_and_comparisons_are_those_of_the_files() {
    let run = run_with("");
    let name = run.path().file_name().unwrap().to_str().unwrap();
    std::fs::create_dir(run.path().join("samples")).unwrap();
    for step in [1, 2] {
        let groups =
            [(7, json!([{"reward": 0.0, "stop": "length"}, {"reward": 1.0}])), (8, json!([{"reward": 1.0}]))];
        for (task, trajectories) in groups {
            let group = json!({"group": step * 10 + task, "task": task, "trajectories": trajectories});
            append(run.path(), &format!("samples/step_00000{step}.jsonl"), &format!("{group}\n"));
        }
    }
    let row = json!({"group": 17, "index": 1, "branch": 0, "texts": [HOSTILE], "advantages": [null]});
    append(run.path(), "samples/step_000001_tokens.jsonl", &format!("{row}\n"));
    let page = ServedPage::of(&[run.path()]);
    let get = |path: &str, query: &str| page.get(&format!("/api/{path}?run={name}&{query}"));
    assert_eq!(get("steps", "").json(), json!([1, 2]));
    assert_eq!(get("tokens", "step=1&group=17&index=1").json()["rows"], json!([row]));
    let missing = get("tokens", "step=2&group=17&index=1");
    assert_eq!(
        (missing.status, missing.body.as_str()),
        (404, "step 2 has no tokens; `log.tokens` writes them")
    );
    let matching =
        |query: &str| get("samples", &format!("step=1&{query}")).json()["matching"].as_u64().unwrap();
    assert_eq!((matching(""), matching("differing=true"), matching("reward_from=0.5")), (2, 1, 2));
    assert_eq!((matching("reward_to=0.5"), matching("stop=length"), matching("stop=other")), (1, 1, 0));
    let compared = get("compare", "step=2&other=1").json();
    assert_eq!(
        (&compared["pairs"][1]["left"]["group"], &compared["pairs"][1]["right"]["group"]),
        (&json!(28), &json!(18))
    );
    assert_eq!(get("compare", "step=2&other=9").status, 404);
    assert_eq!(get("shared", "step=1").json(), json!({"steps": [{"step": 2, "tasks": 2}], "next": null}));
}

#[test]
fn a_status_that_is_replaced_is_announced() {
    let run = run_with("{\"step\":1,\"time/step\":2}\n");
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let page = ServedPage::of(&[run.path()]);
    let mut stream = page.stream();
    let status = || page.get(&format!("/api/status?run={name}")).json()["status"].clone();
    assert_eq!(status(), json!(null));
    let write = |text: &str| {
        std::fs::write(run.path().join("status.new"), text).unwrap();
        std::fs::rename(run.path().join("status.new"), run.path().join("status.json")).unwrap();
    };
    for text in ["{\"roles\":[\"a\"]}", "{\"roles\":[\"b\"]}"] {
        crate::client::next_event(&mut stream);
        write(text);
    }
    crate::client::next_event(&mut stream);
    assert_eq!(status(), json!({"roles": ["b"]}));
    append(run.path(), "run.json", "{\"host\":\"machine\"}");
    let about = page.get(&format!("/api/about?run={name}")).json();
    assert_eq!((&about["facts"]["host"], &about["timings"][0]["total_s"]), (&json!("machine"), &json!(2.0)));
}

/// `/api/why` is what `rlrun why` prints, with recommendations where the program has some.
#[test]
fn where_the_time_went_is_what_the_program_computes() {
    let run = run_with("");
    let line = |kind: &str, step: u64, start: f64, end: f64| {
        format!(
            "{{\"lane\":\"trainer\",\"kind\":\"{kind}\",\"start\":{start},\"end\":{end},\"step\":{step}}}\n"
        )
    };
    let lines = |step: u64| {
        let start = 3.0 * step as f64;
        line("save_checkpoint", step, start, start + 1.0)
            + &line("forward_backward", step, start + 1.0, start + 3.0)
    };
    append(run.path(), "timeline.jsonl", &(1..4).map(lines).collect::<String>());
    let page = ServedPage::of(&[run.path()]);
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let path = format!("/api/why?run={name}");
    let mut answer = page.get(&path).json();
    assert_eq!(answer["read"], 1.0);
    answer.as_object_mut().unwrap().remove("read");
    assert_eq!(answer, dashboard::why::explain(run.path()).unwrap().to_json());
    assert_eq!((&answer["wall_s"], &answer["causes"][0]["cause"]), (&json!(9.0), &json!("training")));
    append(run.path(), "timeline.jsonl", &lines(4));
    assert_eq!(page.get(&path).json()["steps"], 4, "the file is followed");
}
