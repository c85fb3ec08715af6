//! The listener of the service, plain or with TLS.
//!
//! Invariant: a listener that other machines can reach has keys. A connection costs its own task and a place in the limit of
//! connections. After a stop waits for results end at once, and other requests within the limit for it.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests, listen};
use connect::tls::Tls;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::http::{ApiState, ServiceAccess, routes};
use crate::training::TrainingService;

/// Longest time to receive the head of a request, and of a handshake.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Longest time that a client accepts no byte of an answer.
const WRITE_STALL: Duration = Duration::from_secs(60);

/// How a service listens.
#[derive(Clone, Debug)]
pub struct TrainingServerConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Who may use it.
    pub access: ServiceAccess,
    /// Certificate; `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// Most connections.
    pub max_connections: usize,
    /// Longest time to finish requests at a stop.
    pub stop: Duration,
}

impl TrainingServerConfig {
    /// Listens on `listen` for everyone, in plain HTTP, with the default limits. Only a loopback address may be without keys.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        let access = ServiceAccess::new(&[]);
        Self { listen, access, tls: None, max_connections: 4096, stop: Duration::from_secs(30) }
    }
}

/// Why a service cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingServerError {
    /// The address is reachable from other machines, without a key.
    #[error(
        "{address} can be reached from other machines: give the keys of its users, or listen on 127.0.0.1"
    )]
    NoKey {
        /// The address.
        address: SocketAddr,
    },
    /// The system refuses to listen.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free one")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A service that listens.
#[derive(Debug)]
pub struct TrainingServer {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    stopping: watch::Sender<bool>,
    config: TrainingServerConfig,
}

impl TrainingServer {
    /// Listens.
    ///
    /// # Errors
    /// An address that others can reach, without a key; an address that cannot be used.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind(
        service: TrainingService,
        config: TrainingServerConfig,
    ) -> Result<Self, TrainingServerError> {
        let address = config.listen;
        check(address, &config.access)?;
        let failed = |source| TrainingServerError::Listen { address, source };
        let listener = listen(address, config.max_connections).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut access = config.access.clone();
        access.encrypted = config.tls.is_some();
        access.remote = !address.ip().is_loopback();
        let (stopping, stopped) = watch::channel(false);
        let router = routes(ApiState::with_stop(service, access, stopped));
        Ok(Self { listener, address, router, stopping, config })
    }

    /// The address, with the actual port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop`; those that have begun are finished within [`TrainingServerConfig::stop`].
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, address: _, router, stopping, config } = self;
        let limits = ConnectionLimits {
            connections: config.max_connections,
            head_read: HEAD_TIME,
            write_stall: WRITE_STALL,
            stop: config.stop,
        };
        let acceptor = config.tls.as_ref().map(Tls::acceptor);
        let answer = |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            let routes = TowerToHyperService::new(router.clone());
            let acceptor = acceptor.clone();
            Some(async move {
                match acceptor {
                    None => answer_requests(stream, watcher, HEAD_TIME, routes).await,
                    Some(acceptor) => {
                        if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_TIME, acceptor.accept(stream)).await
                        {
                            answer_requests(stream, watcher, HEAD_TIME, routes).await;
                        }
                    }
                }
                drop(permit);
            })
        };
        let stopped = async || {
            stopping.send_replace(true);
        };
        accept_connections(listener, limits, stop, stopped, answer).await;
    }
}

fn check(address: SocketAddr, access: &ServiceAccess) -> Result<(), TrainingServerError> {
    if address.ip().is_loopback() || access.requires_key() {
        Ok(())
    } else {
        Err(TrainingServerError::NoKey { address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_network_needs_a_key() {
        let network: SocketAddr = "0.0.0.0:0".parse().unwrap();
        let loopback: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let open = ServiceAccess::new(&[]);
        let error = check(network, &open).unwrap_err();
        assert!(error.to_string().contains("give the keys"), "{error}");
        check(loopback, &open).unwrap();
        check(network, &ServiceAccess::new(&["tml-one".to_owned()])).unwrap();
    }
}
