//! Agents whose loop is their own, in whole runs: they speak HTTP to the policy, and what was sampled for them is trained on.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Home, Run, Running, finish, interrupt};

/// Agents of the run start a process each.
const RECIPE: &str = r#"
[model.random]
[data]
train = "tasks.jsonl"
max_prompt_length = 16
[environment]
kind = "agent"
path = "agent.py:play"
max_turns = 8
max_tokens = 96
processes = 8
[rollout]
group_size = 4
max_completion_length = 4
bitwise = true
[buffer]
batch_groups = 2
max_staleness = 0
[trainer]
steps = 3
microbatch_tokens = 256
[log]
samples = 2
"#;

/// Asks over plain HTTP. The second agent of a group begins a second conversation, the third goes back and changes its first
/// answer, the last one fails.
const AGENT: &str = r#"
import json, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"messages": messages, "max_tokens": 50, "temperature": 0.2, "top_p": 0.5}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def play(base_url, api_key, row, index):
    if index == 3:
        raise RuntimeError("this agent is lost")
    messages, reward = [{"role": "user", "content": row["prompt"]}], 0.0
    for turn in range(3):
        text = ask(base_url, api_key, messages)
        reward += sum(letter in "aeiou" for letter in text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"<{turn}>"}]
    if index == 1:
        reward += len(ask(base_url, api_key, [{"role": "user", "content": "other"}]))
    if index == 2:
        messages[1]["content"] = "rewritten"
        ask(base_url, api_key, messages)
    return reward
"#;

const TASKS: &str = "{\"prompt\": \"ab\", \"answer\": \"2\"}\n{\"prompt\": \"cd\", \"answer\": \"5\"}\n";

fn mean(run: &Run, name: &str) -> f64 {
    let values = run.values(name);
    values.iter().sum::<f64>() / values.len() as f64
}

fn home(recipe: &str) -> Home {
    let home = Home::new();
    home.write("agent.toml", recipe);
    home.write("agent.py", AGENT);
    home.write("tasks.jsonl", TASKS);
    home
}

/// `rollout.bitwise` compares every log-probability that a session recorded with the trainer's.
#[test]
fn agents_over_http_train_the_policy_on_the_tokens_that_they_were_sent() {
    let home = home(RECIPE);
    home.rlrun(&["agent.toml", "--run-dir", "run", "--set", "log.schedule=true"]).ok();
    let replayed = home.rlrun(&["replay", "run", "-q"]).ok().stdout;
    assert!(replayed.contains(" bit for bit: 3 steps"), "{replayed}");
    assert!(replayed.contains("24 trajectories of external sessions were taken as recorded"), "{replayed}");
    let run = home.run("run");
    assert!(run.values("kl/mismatch").iter().all(|mismatch| *mismatch == 0.0));
    assert_eq!(run.values("environment/failed"), [2.0; 3], "one agent of each group");
    let turns = mean(&run, "environment/turns");
    assert!((turns - (3.0 + 4.0 + 4.0) / 3.0).abs() < 1e-9, "{turns} turns");
    assert!((mean(&run, "environment/branches") - 5.0 / 3.0).abs() < 1e-9);
    assert!((mean(&run, "environment/clean") - 2.0).abs() < 1e-9);
    let groups: Vec<Value> = (1..=3).flat_map(|step| run.samples(step)).map(Value::Object).collect();
    assert_eq!(groups.len(), 6);
    for group in &groups {
        let [plain, second, rewritten, lost] = &group["trajectories"].as_array().unwrap()[..] else {
            panic!("a group has four episodes: {group}")
        };
        assert!(plain.get("branches").is_none(), "{plain}");
        for branched in [second, rewritten] {
            let [first, other] = &branched["branches"].as_array().unwrap()[..] else { panic!("{branched}") };
            assert_eq!((&first["turns"], &other["turns"]), (&Value::from(3), &Value::from(1)), "{branched}");
        }
        assert!(plain["reward"].is_number() && lost["reward"].is_null(), "{group}");
        assert!(lost["components"].to_string().contains("this agent is lost"), "{lost}");
    }
}

/// A rollout function as TRL's documents have it: two turns of token ids by the client of its trainer.
const ROLLOUT_FUNCTION: &str = r#"
def rollout_func(prompts, trainer):
    tokenizer, client = trainer.processing_class, trainer.vllm_generation.vllm_client
    sampling = {"max_tokens": trainer.max_completion_length, "temperature": trainer.args.temperature, "top_p": trainer.args.top_p}
    found = {key: [] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "env_reward")}
    for prompt in prompts:
        for _ in range(trainer.num_generations):
            prompt_ids = tokenizer(prompt)["input_ids"]
            first = client.generate([prompt_ids], **sampling)
            assert first["prompt_ids"] == [prompt_ids], first
            [ids] = first["completion_ids"]
            said = tokenizer.encode("<0>", add_special_tokens=False)
            [more] = client.generate([prompt_ids + ids + said], **sampling)["completion_ids"]
            found["prompt_ids"].append(prompt_ids)
            found["completion_ids"].append(ids + said + more)
            found["logprobs"].append([0.0] * len(ids + said + more))
            found["env_mask"].append([1] * len(ids) + [0] * len(said) + [1] * len(more))
            text = tokenizer.decode(ids, skip_special_tokens=True) + tokenizer.batch_decode([more], skip_special_tokens=True)[0]
            found["env_reward"].append(float(sum(letter in "aeiou" for letter in text)))
    return found
"#;

/// A generate function as slime's examples have it: two turns by SGLang's route, the second with what the first was answered.
const GENERATE_FUNCTION: &str = r#"
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout and args.bonus == 0.5
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    prompt, response, mask = len(ids), "", []
    for turn in range(2):
        payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [token for _, token, _ in meta["output_token_logprobs"]]
        assert new == output["output_ids"] and meta["prompt_tokens"] == len(ids)
        observation = state.tokenizer("<0>", add_special_tokens=False)["input_ids"] if turn == 0 else []
        response += output["text"]
        mask += [1] * len(new) + [0] * len(observation)
        ids = ids + new + observation
    sample.tokens, sample.response, sample.response_length, sample.loss_mask = ids, response, len(ids) - prompt, mask
    sample.status = Sample.Status.COMPLETED
    sample.reward = args.bonus + sum(letter in "aeiou" for letter in response)
    return sample
"#;

/// Their tokens are continued, and what the sessions recorded of them is what the trainer computes.
#[test]
fn functions_of_trl_and_slime_train_unchanged() {
    for (file, text, parameters) in [
        ("trl.py", ROLLOUT_FUNCTION, ""),
        ("generate.py", GENERATE_FUNCTION, "\nparameters = { bonus = 0.5 }"),
    ] {
        let path = format!("path = \"{file}\"{parameters}");
        let home = home(&RECIPE.replace("path = \"agent.py:play\"", &path));
        home.write(file, text);
        home.rlrun(&["agent.toml", "--run-dir", "run"]).ok();
        let run = home.run("run");
        assert_eq!(run.values("environment/failed"), [0.0; 3], "{file}");
        assert_eq!(run.values("kl/mismatch"), [0.0; 3], "{file}");
        for (name, expected) in [("turns", 2.0), ("branches", 1.0), ("clean", 1.0), ("fork", 0.0)] {
            assert!((mean(&run, &format!("environment/{name}")) - expected).abs() < 1e-9, "{file}: {name}");
        }
    }
}

/// What such a function returns wrongly fails its episode with the reason.
#[test]
fn a_rollout_function_without_its_fields_fails_its_episodes() {
    let home = home(&RECIPE.replace("agent.py:play", "trl.py"));
    home.write("trl.py", "def rollout_func(prompts, trainer):\n    return {\"prompt_ids\": [[1]]}\n");
    let done = home.rlrun(&["agent.toml", "--run-dir", "run"]);
    assert!(done.stderr.contains("no trajectory of the last 3 steps could be scored"), "{}", done.stderr);
    let group = Value::Object(home.run("run").samples(3).remove(0)).to_string();
    assert!(group.contains("returned no completion_ids, logprobs"), "{group}");
}

/// Two turns, worth a point for each vowel.
const LEARNER: &str = r#"
from agent import ask

def play(base_url, api_key, row):
    first = [{"role": "user", "content": row["prompt"]}]
    text = ask(base_url, api_key, first)
    said = [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return float(sum(letter in "aeiou" for letter in text + ask(base_url, api_key, first + said)))
"#;

/// Synchronous, and so a function of its seed: what an agent is answered does not depend on when it asks.
#[test]
fn the_policy_learns_from_agents_as_from_any_environment() {
    let home = home(&RECIPE.replace("group_size = 4", "group_size = 8").replace("agent.py", "learner.py"));
    home.write("learner.py", LEARNER);
    let learn = |run: &str, steps: &str| {
        let sets = ["--set", steps, "--set", "trainer.learning_rate=0.01", "--set", "buffer.batch_groups=4"];
        home.rlrun(&[&["agent.toml", "--run-dir", run], &sets[..]].concat()).ok();
        home.run(run).values("reward/mean")
    };
    let rewards = learn("run", "trainer.steps=30");
    let of = |steps: &[f64]| steps.iter().sum::<f64>() / steps.len() as f64;
    let (before, after) = (of(&rewards[..5]), of(&rewards[25..]));
    assert!(after > before + 1.0, "vowels per game: {before} before, {after} after");
    assert_eq!(learn("again", "trainer.steps=5"), rewards[..5], "a repeated run has the same games");
}

/// Agents of others, which start a session for each episode, in one process of Python without any package.
const OTHERS: &str = r#"
import json, sys, urllib.error, urllib.request

base = sys.argv[1]

def post(path, body, key="key-of-the-operator"):
    headers = {"Content-Type": "application/json", "x-api-key": key}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def ask(key, text):
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, key)

ready = sys.stdin.readline()
played = 0
while True:
    try:
        status, session = post("/rl/start_session", {"task_id": f"task {played // 2}"})
    except OSError:
        break
    if status == 429:
        continue
    key, task = session["api_key"], session["task"]
    status, answer = ask(key, task["columns"]["prompt"])
    if status != 200:
        break
    text = answer["choices"][0]["message"]["content"]
    if played == 0:
        # The name of a task is that of a whole group.
        others = [post("/rl/start_session", {"task_id": "other"})[1] for _ in range(2)]
        print(json.dumps({
            "foreign": post("/rl/set_reward", {"session_id": others[0]["session_id"], "reward": 9.0}, key)[0],
            "wrong": ask("sk-of-no-session", "x")[0],
            "unknown": post("/rl/set_reward", {"interaction_id": "chatcmpl-none", "reward": 9.0}, key)[0],
            "early": post("/export_trajectories", {"session_id": session["session_id"]})[0],
        }), flush=True)
        [post("/rl/end_session", {}, other["api_key"]) for other in others]
    reward = float(sum(letter in "aeiou" for letter in text))
    post("/rl/set_reward", {"interaction_id": answer["id"], "reward": reward}, key)
    post("/rl/end_session", {}, key)
    if played == 0:
        print(json.dumps({"ended": ask(key, "x")[0]}), flush=True)
    played += 1
"#;

/// Where the policy of the run is served, without `/v1`.
fn served_at(home: &Home, run: &mut Running) -> String {
    const SERVED: &str = "the policy is served at ";
    home.run("run").wait_to_show(SERVED, run);
    let log = std::fs::read_to_string(home.path("run/logs/attempt_1.log")).unwrap();
    let address = log.split_once(SERVED).unwrap().1.split_whitespace().next().unwrap();
    address.trim_end_matches("/v1").to_owned()
}

#[test]
fn agents_of_others_take_the_episodes_of_a_run() {
    let recipe = RECIPE
        .replace("kind = \"agent\"\npath = \"agent.py:play\"", "kind = \"sessions\"")
        .replace("processes = 8\n", "")
        .replace("group_size = 4", "group_size = 2")
        .replace("[log]", "[endpoint]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"keys\"\nidle_s = 5.0\n[log]");
    let home = home(&recipe);
    home.write("others.py", OTHERS);
    home.write("keys", "admin key-of-the-operator\n");
    let mut run = home.start(&["agent.toml", "--run-dir", "run"]);
    let address = served_at(&home, &mut run);
    let mut agents = Command::new("python3")
        .args([home.path("others.py").as_os_str(), std::ffi::OsStr::new(&address)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    agents.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let lines: Vec<String> =
        BufReader::new(agents.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
    finish(run).ok();
    agents.wait().unwrap();
    let of = |line: usize, name: &str| serde_json::from_str::<Value>(&lines[line]).unwrap()[name].clone();
    let statuses = ["foreign", "wrong", "unknown", "early"].map(|name| of(0, name).as_u64().unwrap());
    assert_eq!(statuses, [403, 401, 404, 400], "{lines:?}");
    assert_eq!(of(1, "ended"), 410);
    let run = home.run("run");
    assert_eq!(run.steps().len(), 3);
    assert!(run.values("kl/mismatch").iter().all(|mismatch| *mismatch == 0.0));
}

/// Agents that leave in every way that there is: eight at a time, `argv[2]` sessions.
const CHURN: &str = r#"
import json, random, socket, sys, threading, time, urllib.error, urllib.parse, urllib.request

base, sessions = sys.argv[1], int(sys.argv[2])
host, port = urllib.parse.urlsplit(base).hostname, urllib.parse.urlsplit(base).port
lock, left, ended, answers = threading.Lock(), sessions, 0, 0

def post(path, body, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + key} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(base + path, json.dumps(body).encode(), headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}

def leave(key, body, keep=1.0, read=0):
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((host, port), timeout=60) as connection:
        connection.sendall(head.encode() + raw[: int(len(raw) * keep)])
        if read:
            connection.recv(read)

def agent(seed):
    global left, ended, answers
    draw = random.Random(seed)
    while True:
        with lock:
            if left == 0:
                return
            left -= 1
        while True:
            status, session = post("/rl/start_session", {})
            if status == 200:
                break
            time.sleep(0.005)
        key, messages, given = session["api_key"], [{"role": "user", "content": "ab"}], 0
        for _ in range(draw.randint(1, 3)):
            status, answer = post("/v1/chat/completions", {"messages": messages}, key)
            if status == 200:
                given += 1
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        how = draw.random()
        asked = {"messages": messages}
        if how < 0.15:
            leave(key, asked)
        elif how < 0.3:
            leave(key, asked, keep=0.5)
        elif how < 0.45:
            leave(key, asked | {"stream": True}, read=16)
        if how < 0.6 and draw.random() < 0.5:
            continue  # never ends its session
        post("/rl/set_reward", {"reward": draw.random()}, key)
        if post("/rl/end_session", {}, key)[0] == 200:
            with lock:
                ended, answers = ended + 1, answers + given

threads = [threading.Thread(target=agent, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
deadline = time.monotonic() + 60
while post("/grant_capacity", {})[1]["open"] and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps({"ended": ended, "answers": answers, "open": post("/grant_capacity", {})[1]["open"]}))
"#;

/// `RLRUN_SESSIONS` makes it longer; see `tests/run`.
#[test]
fn agents_that_leave_cost_their_episodes_and_nothing_is_trained_on_twice() {
    let sessions = std::env::var_os("RLRUN_SESSIONS")
        .map_or_else(|| "60".to_owned(), |sessions| sessions.to_str().unwrap().to_owned());
    let recipe = RECIPE
        .replace("kind = \"agent\"\npath = \"agent.py:play\"", "kind = \"sessions\"")
        .replace("processes = 8\n", "")
        .replace("group_size = 4", "group_size = 2")
        .replace("steps = 3", "steps = 100000")
        .replace("max_staleness = 0", "max_staleness = 4")
        .replace(
            "[log]\nsamples = 2",
            "[endpoint]\nlisten = \"127.0.0.1:0\"\nidle_s = 1.0\n[log]\nsamples = 1000",
        );
    let home = home(&recipe);
    home.write("churn.py", CHURN);
    let mut run = home.start(&["agent.toml", "--run-dir", "run"]);
    let address = served_at(&home, &mut run);
    let agents =
        Command::new("python3").arg(home.path("churn.py")).args([&address, &sessions]).output().unwrap();
    assert!(agents.status.success(), "{}", String::from_utf8_lossy(&agents.stderr));
    let said: Value = serde_json::from_slice(&agents.stdout).unwrap();
    assert_eq!(said["open"], 0, "every session ended, or expired: {said}");
    interrupt(&run);
    finish(run).ok();
    let run = home.run("run");
    let steps = run.steps().len() as u64;
    let groups = (1..=steps).flat_map(|step| run.samples(step));
    let episodes: Vec<Value> =
        groups.flat_map(|group| group["trajectories"].as_array().unwrap().clone()).collect();
    let trained: Vec<&Value> = episodes.iter().filter(|episode| episode["reward"].is_number()).collect();
    let turns = |episode: &&Value| episode["turns"].as_array().map_or(1, Vec::len) as u64;
    let (ended, answers) = (said["ended"].as_u64().unwrap(), said["answers"].as_u64().unwrap());
    assert!(!trained.is_empty() && trained.len() as u64 <= ended, "{} of {said}", trained.len());
    // An answer whose agent left while it came may be part of its session.
    let most = answers + ended;
    assert!(trained.iter().map(turns).sum::<u64>() <= most, "{said}");
    assert!(run.values("environment/failed").iter().any(|failed| *failed > 0.0), "lost agents are counted");
}
