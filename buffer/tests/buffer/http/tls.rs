//! TLS, with a certificate of the test's own.

use buffer::http::{Client, ClientConfig, ServerConfig, Tls};
use buffer::{Buffer, Consumer};

use super::super::config;
use super::super::served::{TestServer, loopback};

#[test]
fn a_client_that_trusts_the_certificate_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| directory.path().join(name));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = Some(Tls::read(&certificate, &key).unwrap());
    let served =
        TestServer::start(Buffer::in_memory(config(1, 1)).unwrap(), ServerConfig { tls, ..loopback() });
    let url = format!("https://localhost:{}", served.address.port());

    let trusting = ClientConfig { roots: Some(certificate.clone()), ..ClientConfig::new(url.clone()) };
    assert_eq!(Client::new(trusting).unwrap().stats().unwrap().slots, 2);
    let patience = std::time::Duration::ZERO;
    let strange = Client::new(ClientConfig { patience, ..ClientConfig::new(url) }).unwrap();
    let error = strange.stats().unwrap_err().to_string();
    assert!(error.to_lowercase().contains("certificate"), "{error}");

    let error = Tls::read(&certificate, &certificate).unwrap_err().to_string();
    assert!(error.contains("name a PEM file with the private key"), "{error}");
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&key, other.signing_key.serialize_pem()).unwrap();
    assert!(Tls::read(&certificate, &key).is_err(), "the key of another certificate");
}
