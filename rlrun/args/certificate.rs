//! The certificate of a command that listens.

use std::path::PathBuf;

use clap::Args;
use connect::tls::Tls;

use crate::failure::Failure;

/// Certificate of a server; without one it does not encrypt.
#[derive(Clone, Debug, Default, Args)]
pub struct CertificateArgs {
    /// Certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

impl CertificateArgs {
    /// The certificate with its key; `None` without one.
    ///
    /// # Errors
    /// Files that cannot be read, are no PEM, or do not belong together.
    pub fn read(&self) -> Result<Option<Tls>, Failure> {
        let files = self.tls_cert.as_deref().zip(self.tls_key.as_deref());
        Ok(files.map(|(certificate, key)| Tls::read(certificate, key)).transpose()?)
    }
}
