//! A proxy in front of an HTTP server, with the faults that networks and overloaded servers have.
//!
//! Invariant: one request per connection, on loopback alone; every request is kept for the tests. It forwards what comes
//! unchanged, so signatures stay valid. It ends with the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyFault {
    /// Answered with this status and not forwarded.
    Status(u16),
    /// The connection ends after half of the body; it is not forwarded.
    CutRequest,
    /// Forwarded; the connection ends before the answer.
    LostAnswer,
    /// The answer has fewer bytes than it announces.
    ShortAnswer,
    /// Forwarded after this number of milliseconds.
    Slow(u64),
    /// Forwarded without the conditions of a put.
    Unconditional,
}

/// A request that came.
#[derive(Clone, Debug)]
pub(crate) struct ProxyRequest {
    pub(crate) method: String,
    /// With the query.
    pub(crate) path: String,
    /// Length of the body, bytes.
    pub(crate) length: usize,
    pub(crate) fault: Option<ProxyFault>,
}

/// Chooses the fault of a request; the number counts all requests from 0.
type Choice = Box<dyn FnMut(usize, &ProxyRequest) -> Option<ProxyFault> + Send>;

/// The proxy.
pub(crate) struct FaultyProxy {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<ProxyRequest>>>,
    choice: Arc<Mutex<Choice>>,
    over: Arc<AtomicBool>,
}

impl FaultyProxy {
    /// Forwards to `server`.
    pub(crate) fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let none: Choice = Box::new(|_, _| None);
        let proxy = Self {
            address,
            requests: Arc::default(),
            choice: Arc::new(Mutex::new(none)),
            over: Arc::default(),
        };
        let (requests, choice, over) =
            (Arc::clone(&proxy.requests), Arc::clone(&proxy.choice), Arc::clone(&proxy.over));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (requests, choice) = (Arc::clone(&requests), Arc::clone(&choice));
                // A connection that fails is a client that has gone.
                std::thread::spawn(move || {
                    client.and_then(|client| serve(client, server, &requests, &choice))
                });
            }
        });
        proxy
    }

    /// Chooses faults from now on.
    pub(crate) fn fail(
        &self,
        choice: impl FnMut(usize, &ProxyRequest) -> Option<ProxyFault> + Send + 'static,
    ) {
        *self.choice.lock().unwrap() = Box::new(choice);
    }

    /// The requests since the last call.
    pub(crate) fn take(&self) -> Vec<ProxyRequest> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

impl Drop for FaultyProxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // Ends the wait for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(
    client: TcpStream,
    server: SocketAddr,
    requests: &Mutex<Vec<ProxyRequest>>,
    choice: &Mutex<Choice>,
) -> std::io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut reader = BufReader::new(client.try_clone()?);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 {}
    let mut words = head.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let length = header(&head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut request = ProxyRequest { method, path, length, fault: None };
    {
        let mut requests = requests.lock().unwrap();
        request.fault = choice.lock().unwrap()(requests.len(), &request);
        requests.push(request.clone());
    }
    let mut client = client;
    if request.fault == Some(ProxyFault::CutRequest) {
        reader.read_exact(&mut vec![0; length / 2])?;
        return client.shutdown(Shutdown::Both);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if let Some(ProxyFault::Status(status)) = request.fault {
        let answer = format!("HTTP/1.1 {status} Fault\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        return client.write_all(answer.as_bytes());
    }
    if let Some(ProxyFault::Slow(milliseconds)) = request.fault {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
    let mut upstream = TcpStream::connect(server)?;
    let left_out: &[&str] = match request.fault {
        Some(ProxyFault::Unconditional) => &["connection:", "if-match:", "if-none-match:"],
        _ => &["connection:"],
    };
    upstream.write_all(closing(&head, left_out).as_bytes())?;
    upstream.write_all(&body)?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    match request.fault {
        Some(ProxyFault::LostAnswer) => {}
        Some(ProxyFault::ShortAnswer) => client.write_all(&answer[..answer.len() - 1])?,
        _ => client.write_all(&answer)?,
    }
    client.shutdown(Shutdown::Both)
}

/// The head of a request without some of its fields, after whose answer the server closes the connection.
fn closing(head: &str, left_out: &[&str]) -> String {
    let is_left_out = |line: &str| left_out.iter().any(|name| line.to_lowercase().starts_with(name));
    let lines: Vec<&str> = head.lines().filter(|line| !is_left_out(line) && !line.is_empty()).collect();
    format!("{}\r\nconnection: close\r\n\r\n", lines.join("\r\n"))
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}
