//! On to the backend. STUB.

mod upstream;

pub use upstream::UpstreamSettings;
