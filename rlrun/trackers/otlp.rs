//! The timeline as traces of OpenTelemetry: OTLP over HTTP with JSON (opentelemetry.io/docs/specs/otlp, section OTLP/HTTP).
//!
//! What roles did around a step is one trace; every trajectory is another, with a span for each station of its way.
//!
//! Invariant: the run never waits for the collector. At most [`QUEUED`] steps wait to be sent; what does not fit is dropped and
//! counted. A collector that does not answer is named once.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use connect::{HttpClient, ServerAddress};
use serde_json::{Value, json};

use crate::report::Report;
use crate::timeline::{TimelineLine, TimelineSpan, TimelineTrajectory};

/// Most steps that wait to be sent.
const QUEUED: usize = 64;
/// Deadline of a request, and of all that is left at the end of a run.
const ANSWER: Duration = Duration::from_secs(5);
/// Name of a trace of spans that belong to no step: the start, a stall, what is reported once the last step is written.
const OUTSIDE: &str = "outside of steps";

/// Sends a timeline; the rest of it when this is dropped.
#[derive(Debug)]
pub(crate) struct SpanExporter {
    /// `None` once it is dropped.
    queue: Option<SyncSender<Vec<TimelineLine>>>,
    /// When the run ended.
    over: Arc<OnceLock<Instant>>,
    thread: Option<JoinHandle<()>>,
}

impl SpanExporter {
    /// Sends to the collector at `url`. `origin` is second 0 of the run in seconds since 1970, `run` its name.
    ///
    /// # Errors
    /// A thread that cannot be started, certificates that cannot be read.
    pub(crate) fn start(url: &str, run: &str, origin: f64, report: &Arc<Report>) -> Result<Self, String> {
        let client = HttpClient::new(ServerAddress { url, token: None, roots: None })?;
        let (queue, lines) = sync_channel(QUEUED);
        let (traces, report) = (Traces { run: run.to_owned(), origin }, Arc::clone(report));
        let over = Arc::<OnceLock<Instant>>::default();
        let ended = Arc::clone(&over);
        let work = move || send_all(&client, &traces, &lines, &ended, &report);
        let thread = std::thread::Builder::new().name("otlp".to_owned()).spawn(work);
        Ok(Self { queue: Some(queue), over, thread: Some(thread.map_err(|error| error.to_string())?) })
    }

    /// Queues the lines of a step. False if the queue is full and they are dropped.
    pub(crate) fn send(&self, lines: &[TimelineLine]) -> bool {
        let sent = self.queue.as_ref().map(|queue| queue.try_send(lines.to_vec()));
        !matches!(sent, Some(Err(TrySendError::Full(_))))
    }
}

impl Drop for SpanExporter {
    fn drop(&mut self) {
        let _ = self.over.set(Instant::now());
        drop(self.queue.take());
        // Its deadline bounds this; a panic of it was printed.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// Sends what is queued until the queue is dropped and empty, or [`ANSWER`] has passed since it was dropped.
fn send_all(
    client: &HttpClient,
    traces: &Traces,
    lines: &Receiver<Vec<TimelineLine>>,
    over: &OnceLock<Instant>,
    report: &Report,
) {
    let mut named = false;
    while let Ok(next) = lines.recv() {
        if over.get().is_some_and(|ended| ended.elapsed() > ANSWER) {
            return;
        }
        let Err(reason) = post(client, &traces.of(&next)) else { continue };
        if !std::mem::replace(&mut named, true) {
            let url = client.url();
            report.note(&format!(
                "the collector at {url} takes no traces: {reason}; the run goes on, and what it does not take is dropped"
            ));
        }
    }
}

fn post(client: &HttpClient, traces: &Value) -> Result<(), String> {
    let request = client.request("POST", "/v1/traces").header("content-type", "application/json");
    let request = request.body(traces.to_string()).map_err(|error| error.to_string())?;
    let answer = client.send(request, ANSWER).map_err(|error| error.to_string())?;
    let status = answer.status();
    if status.is_success() { Ok(()) } else { Err(format!("status {status}")) }
}

/// Makes traces of lines.
struct Traces {
    run: String,
    /// Seconds since 1970 at second 0 of the run.
    origin: f64,
}

impl Traces {
    /// The body of a request.
    fn of(&self, lines: &[TimelineLine]) -> Value {
        let mut spans = Vec::new();
        let roles = || {
            lines.iter().filter_map(|line| match line {
                TimelineLine::Span(span) => Some(span),
                TimelineLine::Trajectory(_) => None,
            })
        };
        let start = roles().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = roles().map(|span| span.end).fold(f64::NEG_INFINITY, f64::max);
        if let Some(first) = roles().next() {
            let step = roles().find_map(|span| span.step);
            let key = format!("step {step:?} {} {start}", first.lane);
            let trace = Trace::new(&self.run, &key);
            let name = step.map_or_else(|| OUTSIDE.to_owned(), |step| format!("step {step}"));
            spans.push(self.span(&trace, 0, &name, (start, end), &[("rlrun.step", json!(step))]));
            spans.extend(roles().zip(1..).map(|(span, number)| self.role(&trace, number, span)));
        }
        for line in lines {
            if let TimelineLine::Trajectory(of) = line {
                self.trajectory(of, &mut spans);
            }
        }
        let text = |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
        let resource = [text("service.name", "rlrun"), text("service.instance.id", &self.run)];
        json!({ "resourceSpans": [{
            "resource": { "attributes": resource },
            "scopeSpans": [{ "scope": { "name": "rlrun", "version": env!("CARGO_PKG_VERSION") }, "spans": spans }],
        }] })
    }

    fn role(&self, trace: &Trace, number: u64, span: &TimelineSpan) -> Value {
        let attributes = [
            ("rlrun.lane", json!(span.lane)),
            ("rlrun.step", json!(span.step)),
            ("rlrun.version", json!(span.version)),
            ("rlrun.count", json!(span.count)),
            ("rlrun.bytes", json!(span.bytes)),
            ("rlrun.note", json!(span.note)),
        ];
        let name = format!("{} {}", span.lane, span.kind);
        self.span(trace, number, &name, (span.start, span.end), &attributes)
    }

    fn trajectory(&self, of: &TimelineTrajectory, spans: &mut Vec<Value>) {
        // The one that a step waited for last can have a second line, with times that were known later.
        let trace = Trace::new(&self.run, &format!("trajectory {} {} {}", of.group.0, of.index, of.start));
        let attributes = [
            ("rlrun.group", json!(of.group)),
            ("rlrun.index", json!(of.index)),
            ("rlrun.step", json!(of.step)),
            ("rlrun.lag", json!(of.lag)),
            ("rlrun.sampler", json!(of.sampled.as_ref().map(|sampled| &sampled.sampler))),
        ];
        spans.push(self.span(&trace, 0, "trajectory", (of.start, of.end), &attributes));
        let mut stations = Vec::new();
        if let Some(sampled) = &of.sampled {
            stations.push(("generate", of.start, sampled.sampled));
            stations.push(("reward", sampled.sampled, sampled.scored));
            stations.push(("queue", sampled.scored, of.leased));
        }
        stations.push(("train", of.leased, of.end));
        let stations = stations.into_iter().zip(1..);
        spans.extend(stations.map(|((name, start, end), n)| self.span(&trace, n, name, (start, end), &[])));
    }

    /// A span; number 0 is the root of its trace.
    fn span(
        &self,
        trace: &Trace,
        number: u64,
        name: &str,
        (start, end): (f64, f64),
        attributes: &[(&str, Value)],
    ) -> Value {
        let nanoseconds = |second: f64| (((second + self.origin) * 1e9).max(0.0) as u64).to_string();
        let attributes = attributes.iter().filter_map(|(key, value)| {
            let value = match value {
                Value::Null => return None,
                Value::Number(number) => json!({ "intValue": number.to_string() }),
                Value::String(text) => json!({ "stringValue": text }),
                other => json!({ "stringValue": other.to_string() }),
            };
            Some(json!({ "key": key, "value": value }))
        });
        let mut span = json!({
            "traceId": trace.id,
            "spanId": trace.span(number),
            "name": name,
            // Internal.
            "kind": 1,
            "startTimeUnixNano": nanoseconds(start),
            "endTimeUnixNano": nanoseconds(end.max(start)),
            "attributes": attributes.collect::<Vec<_>>(),
        });
        if number > 0 {
            span["parentSpanId"] = trace.span(0).into();
        }
        span
    }
}

/// The ids of a trace, which follow from its run and its key.
struct Trace {
    /// 16 bytes in hexadecimal.
    id: String,
}

impl Trace {
    fn new(run: &str, key: &str) -> Self {
        let hash = blake3::hash(format!("{run}\n{key}").as_bytes()).to_hex();
        Self { id: hash[..32].to_owned() }
    }

    /// 8 bytes in hexadecimal.
    fn span(&self, number: u64) -> String {
        blake3::hash(format!("{}\n{number}", self.id).as_bytes()).to_hex()[..16].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use trajectory::GroupId;

    use super::*;
    use crate::report::Style;
    use crate::timeline::SampledTimes;

    fn lines() -> Vec<TimelineLine> {
        let span = |lane: &'static str, start, end| TimelineSpan {
            lane: lane.into(),
            kind: "wait",
            start,
            end,
            step: Some(3),
            note: Some("a \"slot\"".into()),
            ..TimelineSpan::default()
        };
        let sampled = SampledTimes {
            sampled: 2.0,
            scored: 2.5,
            settled: 2.5,
            stored: 2.5,
            sampler: "sampler 0".to_owned(),
        };
        let (group, versions) = (GroupId(7), Vec::new());
        vec![
            TimelineLine::Span(span("trainer", 1.0, 2.0)),
            TimelineLine::Span(span("sampler 0", 0.5, 1.5)),
            TimelineLine::Trajectory(TimelineTrajectory {
                group,
                index: 1,
                step: 3,
                lag: 2,
                versions,
                start: 1.0,
                sampled: Some(sampled),
                leased: 3.0,
                last: false,
                end: 4.0,
            }),
        ]
    }

    #[test]
    fn a_step_and_every_trajectory_are_traces_with_a_root() {
        let traces = Traces { run: "r".to_owned(), origin: 1e9 }.of(&lines());
        let spans = traces["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap();
        let names: Vec<&str> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
        let expected = [
            "step 3",
            "trainer wait",
            "sampler 0 wait",
            "trajectory",
            "generate",
            "reward",
            "queue",
            "train",
        ];
        assert_eq!(names, expected);
        let roots: Vec<_> = spans.iter().filter(|span| span.get("parentSpanId").is_none()).collect();
        assert_eq!(roots.len(), 2);
        assert_eq!(roots[0]["startTimeUnixNano"], "1000000000500000000");
        assert_eq!(roots[0]["endTimeUnixNano"], "1000000002000000000");
        for span in spans {
            assert!(roots.iter().any(|root| root["traceId"] == span["traceId"]));
            assert_eq!(span["traceId"].as_str().unwrap().len(), 32);
            assert_eq!(span["spanId"].as_str().unwrap().len(), 16);
        }
        let ids: std::collections::BTreeSet<_> = spans.iter().map(|span| span["spanId"].as_str()).collect();
        assert_eq!(ids.len(), spans.len());
    }

    #[test]
    fn a_collector_gets_what_is_queued_and_one_that_is_gone_is_named_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let report = Arc::new(Report::new(Style::detect(true, &std::collections::BTreeMap::new())));
        let exporter = SpanExporter::start(&url, "r", 0.0, &report).unwrap();
        assert!(exporter.send(&lines()));
        let (mut stream, _) = listener.accept().unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"]}]}") {
            let mut part = [0; 4096];
            let read = stream.read(&mut part).unwrap();
            assert!(read > 0);
            seen.extend_from_slice(&part[..read]);
        }
        assert!(seen.starts_with(b"POST /v1/traces HTTP/1.1"));
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").unwrap();
        drop((stream, listener));
        assert!(exporter.send(&lines()));
        drop(exporter);
    }
}
