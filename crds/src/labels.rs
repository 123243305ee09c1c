//! Group, version and the names under which Switchyard appears in a cluster.

/// API group of every kind of Switchyard.
pub const GROUP: &str = "training.switchyard.dev";
/// API version of every kind of Switchyard.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of every object of Switchyard.
pub const API_VERSION: &str = "training.switchyard.dev/v1alpha1";
