//! Runs with an archive in a server of the S3 protocol, behind a proxy with faults.
//!
//! Invariant: every test needs moto (`PYTHON` names an interpreter that has it), so all are ignored; `tests/run` runs them.
//! `RLRUN_ARCHIVE_ROUNDS` repeats the faults with others in their place.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::faulty_proxy::{FaultyProxy, ProxyFault, ProxyRequest};
use crate::support::{Done, Home, Moment, Run, Running, finish, small_args};

const URL: &str = "s3://bucket/runs/small";
const SET: &str = "checkpoint.url=s3://bucket/runs/small";
/// Of the faults that a request with a body can have.
const FAULTS: [ProxyFault; 5] = [
    ProxyFault::Status(503),
    ProxyFault::CutRequest,
    ProxyFault::LostAnswer,
    ProxyFault::Status(429),
    ProxyFault::Slow(200),
];

/// moto, which keeps buckets in memory.
struct S3Server {
    child: Child,
    address: SocketAddr,
}

impl S3Server {
    /// Starts it with the bucket `bucket`; with `checked`, it compares credentials.
    fn start(checked: bool) -> Self {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let mut command = Command::new(python);
        command.args(["-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]);
        if checked {
            // Two requests without credentials: the server's own, and the bucket.
            command.env("INITIAL_NO_AUTH_ACTION_COUNT", "1");
        }
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            said.push_str(&line);
            let address = line.split_once("Running on http://")?.1.trim();
            address.parse().ok()
        });
        let address = address.unwrap_or_else(|| panic!("moto does not listen: {said}"));
        // It writes a line for every request.
        std::thread::spawn(move || lines.for_each(drop));
        let server = Self { child, address };
        let answer = server.ask("PUT", "/bucket");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        server
    }

    fn ask(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A home, a server, and the proxy through which runs see it.
struct S3Bench {
    home: Home,
    server: S3Server,
    proxy: FaultyProxy,
    endpoint: String,
}

impl S3Bench {
    fn new() -> Self {
        let server = S3Server::start(false);
        let proxy = FaultyProxy::start(server.address);
        let endpoint = format!("http://{}", proxy.address);
        Self { home: Home::new(), server, proxy, endpoint }
    }

    fn variables(&self) -> [(&str, &str); 4] {
        variables(&self.endpoint)
    }

    fn rlrun(&self, args: &[&str]) -> Done {
        self.home.rlrun_with(&self.variables(), args)
    }

    fn small(&self, name: &str, sets: &[&str]) -> Done {
        self.rlrun(&small_args(name, &[sets, &[SET]].concat()))
    }

    fn start_small(&self, name: &str, sets: &[&str]) -> Running {
        self.home.start_with(&self.variables(), &small_args(name, &[sets, &[SET]].concat()))
    }

    /// Resumes the run in the archive in another directory.
    fn elsewhere(&self, name: &str, sets: &[&str]) -> Done {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> =
            ["resume", URL, "--run-dir", name, "--without-journal"].into_iter().chain(sets).collect();
        self.rlrun(&args)
    }

    /// The names of all objects.
    fn objects(&self) -> Vec<String> {
        let answer = self.server.ask("GET", "/bucket?list-type=2");
        let keys = answer.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
        keys.map(str::to_owned).collect()
    }
}

fn variables(endpoint: &str) -> [(&str, &str); 4] {
    [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "public-name"),
        ("AWS_SECRET_ACCESS_KEY", "very-secret"),
    ]
}

fn steps(run: &Run) -> Vec<u64> {
    run.metrics().iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

fn rounds() -> usize {
    let given = std::env::var_os("RLRUN_ARCHIVE_ROUNDS");
    given.and_then(|rounds| rounds.to_str()?.parse().ok()).unwrap_or(1)
}

/// Whether a request stores an object of a commit whose name contains `part`.
fn stores(request: &ProxyRequest, part: &str) -> bool {
    request.method == "PUT" && request.path.contains(part)
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(300), "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "needs moto"]
fn a_run_is_archived_in_s3_and_continues_elsewhere() {
    let bench = S3Bench::new();
    let doctor = ["doctor", "small.toml", "--set", SET, "--set", crate::support::CORRECT];
    let said = bench.rlrun(&doctor).ok().stdout;
    for line in ["conditional put  works", "round trip ", "clock            +0 s", "delete           works"] {
        assert!(said.contains(line) || line.starts_with("clock"), "`{line}` is missing in:\n{said}");
    }
    assert!(said.contains("from this machine to the store"), "{said}");
    assert!(bench.objects().is_empty(), "{:?}", bench.objects());
    bench.small("run", &["trainer.steps=9", "buffer.max_staleness=0"]).ok();
    let done = bench.elsewhere("again", &["trainer.steps=12"]).ok();
    assert!(done.stdout.contains("resumed after step 9"), "{}", done.stdout);
    assert_eq!(steps(&bench.home.run("again")), (0..=12).collect::<Vec<_>>());
    let objects = bench.objects();
    assert!(objects.iter().all(|name| name.starts_with("runs/small/")), "{objects:?}");
    assert!(
        !objects.iter().any(|name| name.contains("step_000006/") || name.contains("probe")),
        "{objects:?}"
    );
    // The lost machine comes back.
    bench.rlrun(&["resume", "run", "--set", "trainer.steps=20"]).refused(&["another start of this run"]);
}

/// Every object needs several requests, and many of them fail.
#[test]
#[ignore = "needs moto"]
fn faults_of_the_network_cost_time_and_nothing_else() {
    for round in 0..rounds() {
        let bench = S3Bench::new();
        bench.proxy.fail(move |number, request| {
            let fault = FAULTS[(number / 3 + round) % FAULTS.len()];
            // The answer to a conditional put of the first lead is covered by another test.
            ((number + round) % 3 == 1 && request.method != "HEAD").then_some(fault)
        });
        bench.small("run", &["trainer.steps=6", "buffer.max_staleness=0"]).ok();
        let faults = bench.proxy.take().iter().filter(|request| request.fault.is_some()).count();
        assert!(faults > 20, "{faults}");
        bench.proxy.fail(move |number, request| match (number + round) % 4 {
            1 if request.method == "GET" => Some(ProxyFault::ShortAnswer),
            2 => Some(ProxyFault::Status(500)),
            _ => None,
        });
        let done = bench.elsewhere("again", &["trainer.steps=7"]).ok();
        assert!(done.stdout.contains("resumed after step 6"), "{}", done.stdout);
        assert!(bench.proxy.take().iter().any(|request| request.fault == Some(ProxyFault::ShortAnswer)));
        assert_eq!(steps(&bench.home.run("again")), (0..=7).collect::<Vec<_>>());
    }
}

#[test]
#[ignore = "needs moto"]
fn parts_of_large_files_are_repeated_alone() {
    let bench = S3Bench::new();
    let mut cut = 0;
    bench.proxy.fail(move |_, request| {
        let is_part = request.path.contains("partNumber=2");
        cut += usize::from(is_part);
        (is_part && cut == 1).then_some(ProxyFault::CutRequest)
    });
    let sizes = [
        "model.random.hidden_size=256",
        "model.random.intermediate_size=1024",
        "model.random.num_layers=3",
        "warmup.steps=1",
        "trainer.steps=1",
        "checkpoint.interval=0",
    ];
    bench.small("run", &sizes).ok();
    let requests = bench.proxy.take();
    let parts = |part: &str| {
        let of_part = |request: &&ProxyRequest| stores(request, part) && request.path.contains("optimizer");
        requests.iter().filter(of_part).count()
    };
    assert!(parts("partNumber=1&") == 1 && parts("partNumber=3&") == 1, "{requests:?}");
    assert!(requests.iter().any(|request| request.fault == Some(ProxyFault::CutRequest)));
    assert!(requests.iter().all(|request| request.length <= 9 << 20), "a part is bounded");
    bench.elsewhere("again", &["trainer.steps=2"]).ok();
    let file =
        |name: &str| fs::read(bench.home.run(name).checkpoint(1).join("optimizer.safetensors")).unwrap();
    assert!(file("run") == file("again"));
}

/// The process is killed while files are on their way: what arrived is not sent again, and another machine resumes from the
/// checkpoint before.
#[test]
#[ignore = "needs moto"]
fn a_run_killed_during_an_upload_sends_only_what_is_missing() {
    let bench = S3Bench::new();
    let is_late = |request: &ProxyRequest| stores(request, "checkpoints/step_000003/model/tokenizer");
    bench.proxy.fail(move |_, request| is_late(request).then_some(ProxyFault::Slow(60_000)));
    let mut child = bench.start_small("run", &["trainer.steps=6", "buffer.max_staleness=0"]);
    let mut before = Vec::new();
    wait_until("the upload of a checkpoint", || {
        before.extend(bench.proxy.take());
        before.iter().any(is_late)
    });
    // Files of earlier batches are recorded.
    child.kill().unwrap();
    drop(child);
    bench.proxy.fail(|_, _| None);
    let first = bench.home.path("run");
    let copy = |to: &str| {
        let status = Command::new("cp").args(["-r", "run", to]).current_dir(bench.home.path("")).status();
        assert!(status.unwrap().success());
    };
    copy("copy");
    let done = bench.rlrun(&["resume", "run"]).ok();
    assert!(done.stdout.contains("resumed after step 3"), "{}", done.stdout);
    let after = bench.proxy.take();
    let sent = |requests: &[ProxyRequest], file: &str| {
        let part = format!("checkpoints/step_000003/{file}");
        requests.iter().filter(|request| stores(request, &part)).count()
    };
    assert_eq!((sent(&before, "model/config.json"), sent(&after, "model/config.json")), (1, 0));
    assert_eq!((sent(&before, "manifest.json"), sent(&after, "manifest.json")), (0, 1));
    assert!(first.join("archive.json").is_file());
    // The copy is of a machine that is no longer the lead.
    bench.rlrun(&["resume", "copy"]).refused(&["another start of this run"]);
    bench.elsewhere("again", &["trainer.steps=7"]).ok();
    assert_eq!(steps(&bench.home.run("again")), (0..=7).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs moto"]
fn a_commit_whose_answer_is_lost_counts_once() {
    let bench = S3Bench::new();
    bench.proxy.fail(|_, request| {
        (request.method == "PUT" && request.path.ends_with("lead.json")).then_some(ProxyFault::LostAnswer)
    });
    bench.small("run", &["trainer.steps=6"]).ok();
    let requests = bench.proxy.take();
    let commits = requests.iter().filter(|request| stores(request, "lead.json")).count();
    // The start, checkpoints 0, 3 and 6, and the end.
    assert_eq!(commits, 5, "{requests:?}");
    bench.proxy.fail(|_, _| None);
    bench.elsewhere("again", &["trainer.steps=7"]).ok();
}

#[test]
#[ignore = "needs moto"]
fn an_outage_delays_acknowledgements_and_a_longer_one_is_an_error() {
    let bench = S3Bench::new();
    let begun = Instant::now();
    let mut since = None;
    bench.proxy.fail(move |_, request| {
        let is_out = since.is_some() || stores(request, "checkpoints/step_000003/");
        let since = is_out.then(|| *since.get_or_insert_with(Instant::now));
        since.is_some_and(|since| since.elapsed() < Duration::from_secs(8)).then_some(ProxyFault::Status(503))
    });
    let done = bench.small("run", &["trainer.steps=6", "rewards[0].timeout_s=5"]).ok();
    assert!(begun.elapsed() > Duration::from_secs(8));
    let said = done.stdout + &done.stderr;
    for part in ["waiting for the archive s3://bucket/runs/small", "503", "answers again after"] {
        assert!(said.contains(part), "`{part}` is missing in:\n{said}");
    }

    bench.proxy.fail(|_, request| stores(request, "step_000009").then_some(ProxyFault::Status(503)));
    let args = ["resume", "run", "--set", "trainer.steps=12", "--set", "deadlines.wait_s=20"];
    let failed = bench.rlrun(&args);
    assert_eq!(failed.status.code(), Some(1), "{}", failed.stderr);
    for part in [
        "the archive of the run: s3://bucket/runs/small: cannot store",
        "no progress for",
        "`deadlines.wait_s`",
    ] {
        assert!(failed.stderr.contains(part), "`{part}` is missing in:\n{}", failed.stderr);
    }
    // Groups of the steps after 6 were not acknowledged: another attempt trains on all of them again.
    bench.proxy.fail(|_, _| None);
    bench.rlrun(&["resume", "run"]).ok();
    let run = bench.home.run("run");
    assert_eq!(steps(&run), (0..=12).collect::<Vec<_>>());
    let mut groups: Vec<u64> =
        (1..=12).flat_map(|step| run.samples(step)).map(|group| group["group"].as_u64().unwrap()).collect();
    groups.sort_unstable();
    groups.dedup();
    assert_eq!(groups.len(), 12 * 8);
}

#[test]
#[ignore = "needs moto"]
fn of_two_leads_in_s3_only_the_newer_one_commits() {
    let bench = S3Bench::new();
    let run = bench.home.run("run");
    let mut child = bench.start_small("run", &["trainer.steps=100000", "checkpoint.interval=1"]);
    assert!(run.wait_for(Moment::Step(4), &mut child));
    let taken = bench.elsewhere("taken", &["trainer.steps=6"]).ok();
    assert!(taken.stdout.contains("this process is the lead of epoch 3"), "{}", taken.stdout);
    let old = finish(child);
    assert_eq!(old.status.code(), Some(1), "{}", old.stderr);
    assert!(old.stderr.contains("no longer the lead of the run"), "{}", old.stderr);
}

#[test]
#[ignore = "needs moto"]
fn what_a_store_refuses_is_named() {
    let bench = S3Bench::new();
    let small = |url: &str| {
        let set = format!("checkpoint.url={url}");
        bench.rlrun(&small_args("refused", &[&set]))
    };
    let said =
        small("s3://nothing/run").refused(&["s3://nothing/run: there is no such bucket", "NoSuchBucket"]);
    assert!(!said.contains("secret") && !bench.home.path("refused").exists(), "{said}");
    // A server that knows no conditions.
    bench.proxy.fail(|_, request| (request.method == "PUT").then_some(ProxyFault::Unconditional));
    small(URL).refused(&["the store has no conditional put", "only to be created (If-None-Match)"]);
    assert!(bench.objects().is_empty(), "{:?}", bench.objects());

    let checked = S3Server::start(true);
    let endpoint = format!("http://{}", checked.address);
    let said = bench.home.rlrun_with(&variables(&endpoint), &small_args("refused", &[SET]));
    let said = said.refused(&["the store refuses to", "403", "check the credentials"]);
    assert!(!said.contains("secret"), "{said}");
}
