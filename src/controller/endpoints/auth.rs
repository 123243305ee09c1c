//! Access control for the metrics. The API server must know the reader's token and confirm its
//! right to `get` `/metrics`.

use axum::http::header::{AUTHORIZATION, HeaderMap, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::{Api, Client};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Path for which the right is checked.
const PATH: &str = "/metrics";
/// How long access granted by the API server is cached. Metrics are scraped every half minute, and
/// a revoked right must end soon.
const CACHE_TTL: Duration = Duration::from_secs(60);
/// Upper bound on cached readers.
const MAX_CACHED: usize = 64;
/// Deadline of both reviews together.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why a reader is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum AuthError {
    #[error("expected `Authorization: Bearer TOKEN` with a token that the API server accepts; got {0}")]
    Unauthenticated(&'static str),
    #[error(
        "user {0} is not allowed to get /metrics; expected a ClusterRole with nonResourceURLs [/metrics] and verbs [get]"
    )]
    Forbidden(String),
    #[error("cannot verify the token with the API server: {0}")]
    Unavailable(String),
}

impl IntoResponse for AuthError {
    fn into_response(self) -> Response {
        let status = match self {
            AuthError::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            AuthError::Forbidden(_) => StatusCode::FORBIDDEN,
            AuthError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        let mut response = (status, format!("{self}\n")).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Checks readers with the API server, and caches those admitted.
pub(super) struct Authorizer {
    client: Client,
    /// Admitted tokens, and the times of their admission.
    admitted: Mutex<HashMap<String, Instant>>,
}

impl Authorizer {
    pub fn new(client: Client) -> Authorizer {
        Authorizer { client, admitted: Mutex::default() }
    }

    /// # Errors
    /// The token is missing or unknown, its user lacks the right, or the API server does not
    /// respond.
    pub async fn check(&self, headers: &HeaderMap) -> Result<(), AuthError> {
        let token = bearer(headers).ok_or(AuthError::Unauthenticated("no token"))?;
        if self.is_admitted(token, Instant::now()) {
            return Ok(());
        }
        let reviews = async {
            let user = self.authenticate(token).await?;
            self.authorize(user).await
        };
        let timeout = |_| AuthError::Unavailable(format!("no response within {} s", DEADLINE.as_secs()));
        tokio::time::timeout(DEADLINE, reviews).await.map_err(timeout)??;
        self.admit(token, Instant::now());
        Ok(())
    }

    fn is_admitted(&self, token: &str, now: Instant) -> bool {
        let admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.get(token).is_some_and(|since| now.duration_since(*since) < CACHE_TTL)
    }

    fn admit(&self, token: &str, now: Instant) {
        let mut admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.retain(|_, since| now.duration_since(*since) < CACHE_TTL);
        if admitted.len() < MAX_CACHED {
            admitted.insert(token.to_string(), now);
        }
    }

    async fn authenticate(&self, token: &str) -> Result<UserInfo, AuthError> {
        let spec = TokenReviewSpec { token: Some(token.to_string()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api = Api::<TokenReview>::all(self.client.clone());
        let response = api.create(&Default::default(), &review).await.map_err(unavailable)?;
        let authenticated = response.status.filter(|status| status.authenticated == Some(true));
        authenticated.and_then(|status| status.user).ok_or(AuthError::Unauthenticated("an unknown token"))
    }

    async fn authorize(&self, user: UserInfo) -> Result<(), AuthError> {
        let name = user.username.clone().unwrap_or_default();
        let attributes = NonResourceAttributes { path: Some(PATH.into()), verb: Some("get".into()) };
        let spec = SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api = Api::<SubjectAccessReview>::all(self.client.clone());
        let response = api.create(&Default::default(), &review).await.map_err(unavailable)?;
        response.status.is_some_and(|status| status.allowed).then_some(()).ok_or(AuthError::Forbidden(name))
    }
}

fn unavailable(error: kube::Error) -> AuthError {
    AuthError::Unavailable(error.to_string())
}

/// The bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    Some(token.trim()).filter(|token| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// An API server that knows the tokens `reader` and `stranger`; only the first may read.
    fn server(calls: &Arc<AtomicUsize>) -> Client {
        let calls = Arc::clone(calls);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            calls.fetch_add(1, Ordering::Relaxed);
            async move {
                let bytes = request.into_body().collect_bytes().await?;
                let mut review: Value = serde_json::from_slice(&bytes).unwrap();
                review["status"] = match review["kind"].as_str().unwrap() {
                    "TokenReview" => {
                        let token = review["spec"]["token"].clone();
                        let authenticated = token == "reader" || token == "stranger";
                        json!({"authenticated": authenticated, "user": {"username": token, "groups": ["g"], "extra": {"k": ["v"]}}})
                    }
                    _ => {
                        let attributes = &review["spec"]["nonResourceAttributes"];
                        assert_eq!((&attributes["path"], &attributes["verb"]), (&json!("/metrics"), &json!("get")));
                        assert_eq!(
                            (&review["spec"]["groups"], &review["spec"]["extra"]),
                            (&json!(["g"]), &json!({"k": ["v"]}))
                        );
                        json!({"allowed": review["spec"]["user"] == "reader"})
                    }
                };
                Ok::<_, kube::Error>(http::Response::new(kube::client::Body::from(review.to_string().into_bytes())))
            }
        });
        Client::new(service, "default")
    }

    fn with(value: &str) -> HeaderMap {
        [(AUTHORIZATION, HeaderValue::from_str(value).unwrap())].into_iter().collect()
    }

    #[tokio::test]
    async fn only_a_valid_token_with_the_right_is_admitted() {
        let calls = Arc::new(AtomicUsize::new(0));
        let authorizer = Authorizer::new(server(&calls));
        for nothing in [HeaderMap::new(), with("Basic cmVhZGVy"), with("Bearer "), with("reader")] {
            assert_eq!(authorizer.check(&nothing).await, Err(AuthError::Unauthenticated("no token")));
        }
        assert_eq!(calls.load(Ordering::Relaxed), 0, "no review without a token");
        assert_eq!(
            authorizer.check(&with("Bearer made-up")).await,
            Err(AuthError::Unauthenticated("an unknown token"))
        );
        assert_eq!(authorizer.check(&with("Bearer stranger")).await, Err(AuthError::Forbidden("stranger".into())));
        assert_eq!(authorizer.check(&with("Bearer reader")).await, Ok(()));
        let before = calls.load(Ordering::Relaxed);
        assert_eq!(authorizer.check(&with("bearer reader")).await, Ok(()));
        assert_eq!(calls.load(Ordering::Relaxed), before, "cached for a minute");
        assert_eq!(authorizer.check(&with("Bearer stranger")).await, Err(AuthError::Forbidden("stranger".into())));
        assert_eq!(calls.load(Ordering::Relaxed), before + 2, "a denial is not cached");
    }

    #[tokio::test]
    async fn the_cache_of_admitted_tokens_expires_and_is_bounded() {
        let authorizer = Authorizer::new(server(&Arc::default()));
        let start = Instant::now();
        (0..2 * MAX_CACHED).for_each(|reader| authorizer.admit(&reader.to_string(), start));
        assert!(authorizer.is_admitted("0", start) && !authorizer.is_admitted("64", start));
        assert!(!authorizer.is_admitted("0", start + CACHE_TTL));
        authorizer.admit("late", start + CACHE_TTL);
        assert_eq!(authorizer.admitted.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn an_unreachable_api_server_admits_no_reader() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("down"))
        });
        let authorizer = Authorizer::new(Client::new(service, "default"));
        assert!(matches!(authorizer.check(&with("Bearer reader")).await, Err(AuthError::Unavailable(_))));
    }
}
