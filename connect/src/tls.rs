//! TLS certificate and key of a server. Invariant: unusable files are refused before the server listens.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// TLS certificate and key of a server.
#[derive(Clone)]
pub struct Tls(Arc<ServerConfig>);

/// Why a server cannot use its certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file without a readable certificate or key.
    #[error("{}: {source}; name a PEM file with {needs}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the file should contain.
        needs: &'static str,
        /// What it contains.
        source: pem::Error,
    },
    /// Certificate and key do not match.
    #[error("{} and {} cannot serve TLS: {source}", .certificate.display(), .key.display())]
    Unusable {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The reason.
        source: rustls::Error,
    },
    /// A certificate that this process has made cannot be used.
    #[error("the server's own certificate cannot be used: {0}; this is a mistake in rlrun, please report it")]
    Made(rustls::Error),
}

impl Tls {
    /// Reads a chain of certificates, the server's first, and its private key, both in PEM.
    ///
    /// # Errors
    /// Files that cannot be read, contain neither, or do not match.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let file = |path: &Path, needs| {
            let path = path.to_owned();
            move |source| TlsError::File { path, needs, source }
        };
        let chain = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(file(certificate, "the certificate"))?;
        let secret = PrivateKeyDer::from_pem_file(key).map_err(file(key, "the private key"))?;
        let unusable =
            |source| TlsError::Unusable { certificate: certificate.to_owned(), key: key.to_owned(), source };
        Self::of(chain, secret).map_err(unusable)
    }

    /// Serves with a certificate that this process has made: the certificate and its private key (PKCS 8), both in DER.
    ///
    /// # Errors
    /// Bytes that are neither.
    pub fn from_der(certificate: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = vec![CertificateDer::from(certificate.to_vec())];
        Self::of(chain, PrivatePkcs8KeyDer::from(key.to_vec()).into()).map_err(TlsError::Made)
    }

    fn of(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self, rustls::Error> {
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Self(Arc::new(config)))
    }

    /// Makes the handshakes of a server.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
