//! The credentials that a run makes for itself: tokens, and a certificate authority of its own.
//!
//! ```text
//! DIR/tokens   a line `admin TOKEN` and a line `writer TOKEN`
//! DIR/ca.pem   the certificate that workers trust
//! DIR/ca.key   its key, with which the run signs a certificate for its server at every start
//! ```
//!
//! Invariant: files are made once and only their owner can read them. What is there is never replaced, so that workers that
//! have read it can return to a run that was started again, also on another machine.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use buffer::http::Tls;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::failure::Failure;
use crate::recipe::schema::BufferSection;

/// Directory of the credentials in a run directory.
const DIRECTORY: &str = "credentials";
/// Largest file, bytes.
const MAX_FILE: u64 = 1 << 20;
/// Name of the authority and of the server in their certificates.
const AUTHORITY: &str = "rlrun run";

/// A directory of credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    directory: PathBuf,
}

impl Credentials {
    /// The credentials in `directory`, which need not exist.
    pub(crate) fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The credentials of the run in `run_dir`.
    pub(crate) fn of_run(run_dir: &Path) -> Self {
        Self::new(run_dir.join(DIRECTORY))
    }

    /// The directory, which may not be there yet.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// All files, which may not be there yet.
    pub(crate) fn files(&self) -> [PathBuf; 3] {
        [self.token_file(), self.ca_file(), self.key_file()]
    }

    /// The file of tokens, which may not be there yet.
    pub(crate) fn token_file(&self) -> PathBuf {
        self.directory.join("tokens")
    }

    /// The certificate to trust, which may not be there yet.
    pub(crate) fn ca_file(&self) -> PathBuf {
        self.directory.join("ca.pem")
    }

    fn key_file(&self) -> PathBuf {
        self.directory.join("ca.key")
    }

    /// The token file, made if it is not there.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub(crate) fn tokens(&self) -> Result<PathBuf, Failure> {
        let path = self.token_file();
        if !path.exists() {
            let lines = format!("admin {}\nwriter {}\n", random_hex()?, random_hex()?);
            self.write(&path, &lines)?;
        }
        Ok(path)
    }

    /// Makes the authority if it is not there; returns the certificate to trust.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub(crate) fn authority(&self) -> Result<PathBuf, Failure> {
        let path = self.ca_file();
        if !path.exists() {
            if !self.key_file().exists() {
                let key = KeyPair::generate().map_err(|error| self.unusable(&error))?;
                self.write(&self.key_file(), &key.serialize_pem())?;
            }
            // Of the key in the file, which another process may have written.
            let made = authority().self_signed(&self.key()?).map_err(|error| self.unusable(&error))?;
            self.write(&path, &made.pem())?;
        }
        Ok(path)
    }

    fn key(&self) -> Result<KeyPair, Failure> {
        let path = self.key_file();
        let text = model::files::read_text(&path, MAX_FILE).map_err(|source| Failure::System {
            what: format!("read {}, the key of the run's certificate authority", path.display()),
            source,
        })?;
        KeyPair::from_pem(&text).map_err(|error| self.unusable(&error))
    }

    /// A certificate for a server that is called by one of `names`, host names or addresses, signed by the authority, which is
    /// made if it is not there.
    ///
    /// # Errors
    /// Files that cannot be read or written, or hold something else.
    pub(crate) fn server(&self, names: &BTreeSet<String>) -> Result<Tls, Failure> {
        self.authority()?;
        let issuer = Issuer::new(authority(), self.key()?);
        // A name that no certificate can have is nothing that a client asks for.
        let names: Vec<String> =
            names.iter().filter(|name| CertificateParams::new([(*name).clone()]).is_ok()).cloned().collect();
        let make = || {
            let mut wanted = CertificateParams::new(names)?;
            wanted.distinguished_name = rcgen::DistinguishedName::new();
            wanted.distinguished_name.push(DnType::CommonName, AUTHORITY);
            wanted.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            let own = KeyPair::generate()?;
            let certificate = wanted.signed_by(&own, &issuer)?;
            Ok::<_, rcgen::Error>((certificate.der().to_vec(), own.serialize_der()))
        };
        let (certificate, key) = make().map_err(|error| self.unusable(&error))?;
        Ok(Tls::from_der(&certificate, &key)?)
    }

    /// Writes a file that only its owner can read. One that another process has written meanwhile stays.
    fn write(&self, path: &Path, text: &str) -> Result<(), Failure> {
        let directory = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        let begun = path.with_extension(format!("new{}", std::process::id()));
        let written = directory.and_then(|()| {
            let mut file = std::fs::OpenOptions::new();
            let mut file = file.write(true).create(true).truncate(true).mode(0o600).open(&begun)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            // Unlike a rename this replaces nothing; some file systems have no links.
            match std::fs::hard_link(&begun, path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists && !path.exists() => {
                    std::fs::rename(&begun, path)
                }
                _ => std::fs::remove_file(&begun),
            }
        });
        written.map_err(|source| Failure::System { what: format!("write {}", path.display()), source })
    }

    fn unusable(&self, error: &rcgen::Error) -> Failure {
        Failure::Argument(format!(
            "{}: the run cannot make or use a certificate with what is there: {error}; remove the directory, and the run makes \
             another",
            self.directory.display()
        ))
    }
}

/// The certificate of an authority; two of them differ in their keys alone.
fn authority() -> CertificateParams {
    let mut wanted = CertificateParams::default();
    wanted.distinguished_name = rcgen::DistinguishedName::new();
    wanted.distinguished_name.push(DnType::CommonName, AUTHORITY);
    wanted.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    wanted.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    wanted
}

/// How the server of a run authenticates and encrypts.
#[derive(Debug)]
pub(crate) struct ServerAccess {
    /// The tokens; without them every process of this machine may connect.
    pub(crate) token_file: Option<PathBuf>,
    certificate: ServerCertificate,
}

#[derive(Debug)]
enum ServerCertificate {
    /// Nothing is encrypted.
    None,
    /// A certificate and its key.
    Given(PathBuf, PathBuf),
    /// That of the run's own authority.
    Own(Credentials),
}

impl ServerAccess {
    /// What the recipe gives, and what the run in `run_dir` makes itself if it listens on `listen`: an address that other
    /// machines can reach needs tokens, and TLS unless the recipe says that the network is safe.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub(crate) fn of(buffer: &BufferSection, listen: SocketAddr, run_dir: &Path) -> Result<Self, Failure> {
        let outside = (!listen.ip().is_loopback()).then(|| Credentials::of_run(run_dir));
        let own = buffer.credentials.as_ref().map(Credentials::new).or(outside);
        let token_file = match (&buffer.token_file, &own) {
            (Some(given), _) => Some(given.clone()),
            (None, Some(own)) => Some(own.tokens()?),
            (None, None) => None,
        };
        let certificate = match (&buffer.tls_cert, &buffer.tls_key, own) {
            (Some(certificate), Some(key), _) => ServerCertificate::Given(certificate.clone(), key.clone()),
            (_, _, Some(own)) if !buffer.insecure => ServerCertificate::Own(own),
            _ => ServerCertificate::None,
        };
        Ok(Self { token_file, certificate })
    }

    /// What clients have to trust, if it is not what browsers trust.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub(crate) fn ca(&self) -> Result<Option<PathBuf>, Failure> {
        match &self.certificate {
            ServerCertificate::None => Ok(None),
            ServerCertificate::Given(certificate, _) => Ok(Some(certificate.clone())),
            ServerCertificate::Own(own) => own.authority().map(Some),
        }
    }

    /// The certificate of the server; an own one is for a host that others call by one of `names`.
    ///
    /// # Errors
    /// Files that cannot be read or are no certificate and key.
    pub(crate) fn tls(&self, names: &BTreeSet<String>) -> Result<Option<Tls>, Failure> {
        match &self.certificate {
            ServerCertificate::None => Ok(None),
            ServerCertificate::Given(certificate, key) => Ok(Some(Tls::read(certificate, key)?)),
            ServerCertificate::Own(own) => own.server(names).map(Some),
        }
    }
}

/// 32 random bytes as 64 digits.
fn random_hex() -> Result<String, Failure> {
    random_name().map_err(|source| Failure::System { what: "read /dev/urandom".to_owned(), source })
}

/// A name that no other process has: 32 random bytes as 64 digits.
///
/// # Errors
/// The random source of the system cannot be read.
pub(crate) fn random_name() -> io::Result<String> {
    let mut bytes = [0_u8; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn credentials_are_made_once_and_are_their_owners() {
        let run = tempfile::tempdir().unwrap();
        let credentials = Credentials::of_run(run.path());
        let names = BTreeSet::from(["localhost".to_owned(), "10.0.0.1".to_owned(), "no name".to_owned()]);
        credentials.server(&names).unwrap();
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        let made = (read(credentials.tokens().unwrap()), read(credentials.ca_file()));
        assert!(made.0.starts_with("admin ") && made.0.contains("\nwriter "), "{}", made.0);
        for file in ["tokens", "ca.pem", "ca.key"] {
            assert_eq!(mode(&run.path().join("credentials").join(file)), 0o600, "{file}");
        }
        assert_eq!(mode(&run.path().join("credentials")), 0o700);
        assert_eq!(std::fs::read_dir(run.path().join("credentials")).unwrap().count(), 3);
        credentials.server(&names).unwrap();
        assert_eq!((read(credentials.tokens().unwrap()), read(credentials.ca_file())), made);
    }

    #[test]
    fn a_key_that_is_none_is_refused_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let credentials = Credentials::new(directory.path());
        credentials.authority().unwrap();
        std::fs::write(directory.path().join("ca.key"), "none").unwrap();
        let error = credentials.server(&BTreeSet::new()).unwrap_err().to_string();
        assert!(
            error.contains(&directory.path().display().to_string()) && error.contains("remove"),
            "{error}"
        );
        std::fs::remove_file(directory.path().join("ca.key")).unwrap();
        let error = credentials.server(&BTreeSet::new()).unwrap_err().to_string();
        assert!(error.contains("ca.key"), "{error}");
    }
}
