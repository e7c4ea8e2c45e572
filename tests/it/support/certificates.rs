//! An authority of the test's own, and what it has signed.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// An authority, and a certificate of a server and of a client that it has signed: `ca.pem`, `server.pem`, `server.key`,
/// `client.pem` and `client.key`.
#[derive(Debug)]
pub(crate) struct Certificates(TempDir);

impl Certificates {
    /// Makes all of them.
    pub(crate) fn new() -> Self {
        let certificates = Self(tempfile::tempdir().unwrap());
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
        let authority = ["req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"];
        certificates.openssl(&[&authority[..], &key].concat());
        certificates.write("names", "subjectAltName = IP:127.0.0.1, DNS:localhost\n");
        for who in ["server", "client"] {
            let [private, request, signed] = ["key", "csr", "pem"].map(|ending| format!("{who}.{ending}"));
            let subject = format!("/CN={who}");
            let asked = ["req", "-subj", &subject, "-keyout", &private, "-out", &request];
            certificates.openssl(&[&asked[..], &key[..5]].concat());
            let sign = ["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"];
            let names = ["-extfile", "names", "-in", &request, "-out", &signed];
            certificates.openssl(&[&sign[..], &names].concat());
        }
        certificates
    }

    /// The path of one of the files.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The same as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn openssl(&self, arguments: &[&str]) {
        let directory: &Path = self.0.path();
        let output = Command::new("openssl").args(arguments).current_dir(directory).output();
        let output = output.expect("there is no openssl; ./test installs it (apt: openssl)");
        assert!(
            output.status.success(),
            "openssl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
