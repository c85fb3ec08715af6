//! The listener of servers: connections are accepted up to a limit, and end with the server.
//!
//! Invariant: a connection costs only its own task. It is accepted without waiting for another, is closed when its client is too
//! slow to send a head or to read an answer, and after a stop none of its tasks is left. The limit of connections is counted here,
//! before any HTTP, where no layer of tower can.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::HttpService;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

pub use crate::write_deadline::WriteDeadline;

/// Pause of the listener when the system cannot accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// TCP keepalive: idle time before the first probe, time between probes, number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Buffer size for the head of a request and for reads of a body, bytes.
const READ_BYTES: usize = 64 << 10;

/// What bounds the connections of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Most that are open. A connection above is closed at once.
    pub connections: usize,
    /// Longest time to receive the head of a request.
    pub head_read: Duration,
    /// Longest time that a client accepts no byte of an answer.
    pub write_stall: Duration,
    /// Longest time that requests in progress have after a stop.
    pub stop: Duration,
}

/// Listens on `address`; port 0 takes a free one. The backlog equals the limit of connections, for clients that all connect at once.
///
/// # Errors
/// An address that the system refuses.
pub fn listen(address: SocketAddr, connections: usize) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted server need not wait for the timeout of earlier connections.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(u32::try_from(connections).unwrap_or(u32::MAX))
}

/// A connection that was accepted, with its place among those that may be open.
#[derive(Debug)]
pub struct AcceptedConnection {
    /// The bytes. Writes end when the client accepts none for too long.
    pub stream: WriteDeadline<TcpStream>,
    /// Address of the client.
    pub peer: IpAddr,
    /// Its place; dropping it frees it.
    pub permit: OwnedSemaphorePermit,
    /// Ends the connection with the server.
    pub watcher: Watcher,
}

/// Accepts connections until `stop`, each in the task that `answer` makes of it; `None` stands for one above the limit, which is
/// closed. After the stop `stopped` runs, and then requests in progress have [`ConnectionLimits::stop`] to end.
pub async fn accept_connections<T>(
    listener: TcpListener,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
    stopped: impl AsyncFnOnce(),
    mut answer: impl FnMut(Option<AcceptedConnection>) -> Option<T>,
) where
    T: Future<Output = ()> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            biased;
            () = &mut stop => break,
            // The panic of a handler was printed, and closed only its own connection.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    // Answers are written whole and events are small, so Nagle's algorithm only delays them. Without this
                    // option the server is only slower.
                    let _ = stream.set_nodelay(true);
                    notice_loss(&stream);
                    let permit = Arc::clone(&permits).try_acquire_owned().ok();
                    let accepted = permit.map(|permit| AcceptedConnection {
                        stream: WriteDeadline::new(stream, limits.write_stall),
                        peer: peer.ip(),
                        permit,
                        watcher: graceful.watcher(),
                    });
                    if let Some(answered) = answer(accepted) {
                        connections.spawn(answered);
                    }
                }
                // The client left, or the system is out of resources; the listener continues.
                Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
            },
        }
    }
    drop(listener);
    stopped().await;
    // All tasks have ended, in time or aborted.
    let _ = tokio::time::timeout(limits.stop, graceful.shutdown()).await;
    connections.shutdown().await;
}

/// Has the system close an idle connection whose client cannot be reached any more, as a host that lost its power.
fn notice_loss(stream: &TcpStream) {
    let (idle, interval, count) = KEEPALIVE;
    let set = || -> rustix::io::Result<()> {
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, idle)?;
        sockopt::set_tcp_keepintvl(stream, interval)?;
        sockopt::set_tcp_keepcnt(stream, count)
    };
    // Without it, deadlines of requests notice it later.
    let _ = set();
}

/// Answers the requests of one connection with `service`. An error means that the client left, which drops its answer.
pub async fn answer_requests<S>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    watcher: Watcher,
    head_read: Duration,
    service: S,
) where
    S: HttpService<Incoming>,
    S::ResBody: Body + 'static,
    <S::ResBody as Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_read)
        .max_buf_size(READ_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let _ = watcher.watch(connection).await;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{Read, Write};

    use http_body_util::Full;
    use hyper::body::Bytes;
    use hyper::service::service_fn;
    use hyper::{Request, Response};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    /// Answers with more than the buffers of a socket hold.
    async fn large(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        Ok(Response::new(Full::new(vec![b'x'; 32 << 20].into())))
    }

    #[test]
    fn the_system_looks_for_clients_that_are_silent() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = listen("127.0.0.1:0".parse().unwrap(), 8).unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            notice_loss(&stream);
            assert!(sockopt::socket_keepalive(&stream).unwrap());
            assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEPALIVE.0);
        });
    }

    /// A client that never reads gives its place up, and a stop ends all connections.
    #[test]
    fn a_client_that_does_not_read_loses_its_place() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let limits = ConnectionLimits {
            connections: 1,
            head_read: SOON,
            write_stall: Duration::from_millis(50),
            stop: Duration::from_millis(50),
        };
        let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
        let listener = runtime.block_on(async { listen("127.0.0.1:0".parse().unwrap(), 8) }).unwrap();
        let address = listener.local_addr().unwrap();
        let answer = |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            Some(async move {
                answer_requests(stream, watcher, SOON, service_fn(large)).await;
                drop(permit);
            })
        };
        let stop = async { drop(stopped.await) };
        let server = runtime.spawn(accept_connections(listener, limits, stop, async || {}, answer));
        let ask = || {
            let mut client = std::net::TcpStream::connect(address).unwrap();
            client.set_read_timeout(Some(SOON)).unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").ok().map(|()| client)
        };
        let silent = ask().unwrap();
        // Refused while the first has the only place.
        let begun = std::time::Instant::now();
        let mut head = [0; 12];
        while ask().is_none_or(|mut client| client.read_exact(&mut head).is_err()) {
            assert!(begun.elapsed() < SOON, "the place is not free");
        }
        assert_eq!(&head, b"HTTP/1.1 200");
        drop(stopping);
        runtime.block_on(async { tokio::time::timeout(SOON, server).await }).unwrap().unwrap();
        drop(silent);
    }
}
