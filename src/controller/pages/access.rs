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
const HOLDS: Duration = Duration::from_secs(60);
/// Upper bound on cached readers.
const READERS: usize = 64;
/// Deadline of both reviews together.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why a reader is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("expected `Authorization: Bearer TOKEN` with a token that the API server knows; got {0}")]
    Unknown(&'static str),
    #[error("user {0} may not get /metrics; expected a ClusterRole with nonResourceURLs [/metrics] and verbs [get]")]
    Forbidden(String),
    #[error("the API server cannot be asked who this is: {0}")]
    Unasked(String),
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = match self {
            Refused::Unknown(_) => StatusCode::UNAUTHORIZED,
            Refused::Forbidden(_) => StatusCode::FORBIDDEN,
            Refused::Unasked(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        let mut response = (status, format!("{self}\n")).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Checks readers with the API server, and caches those admitted.
pub(super) struct Access {
    client: Client,
    /// Admitted tokens, and the times of their admission.
    admitted: Mutex<HashMap<String, Instant>>,
}

impl Access {
    pub fn new(client: Client) -> Access {
        Access { client, admitted: Mutex::default() }
    }

    /// # Errors
    /// The token is missing or unknown, its user lacks the right, or the API server does not
    /// respond.
    pub async fn check(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let token = bearer(headers).ok_or(Refused::Unknown("none"))?;
        if self.is_admitted(token, Instant::now()) {
            return Ok(());
        }
        let asked = async {
            let user = self.user(token).await?;
            self.may_read(user).await
        };
        let late = |_| Refused::Unasked(format!("no answer within {} s", DEADLINE.as_secs()));
        tokio::time::timeout(DEADLINE, asked).await.map_err(late)??;
        self.admit(token, Instant::now());
        Ok(())
    }

    fn is_admitted(&self, token: &str, now: Instant) -> bool {
        let admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.get(token).is_some_and(|since| now.duration_since(*since) < HOLDS)
    }

    fn admit(&self, token: &str, now: Instant) {
        let mut admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        admitted.retain(|_, since| now.duration_since(*since) < HOLDS);
        if admitted.len() < READERS {
            admitted.insert(token.to_string(), now);
        }
    }

    async fn user(&self, token: &str) -> Result<UserInfo, Refused> {
        let spec = TokenReviewSpec { token: Some(token.to_string()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api = Api::<TokenReview>::all(self.client.clone());
        let answer = api.create(&Default::default(), &review).await.map_err(unasked)?;
        let known = answer.status.filter(|status| status.authenticated == Some(true));
        known.and_then(|status| status.user).ok_or(Refused::Unknown("another"))
    }

    async fn may_read(&self, user: UserInfo) -> Result<(), Refused> {
        let name = user.username.clone().unwrap_or_default();
        let asked = NonResourceAttributes { path: Some(PATH.into()), verb: Some("get".into()) };
        let spec = SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(asked),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api = Api::<SubjectAccessReview>::all(self.client.clone());
        let answer = api.create(&Default::default(), &review).await.map_err(unasked)?;
        answer.status.is_some_and(|status| status.allowed).then_some(()).ok_or(Refused::Forbidden(name))
    }
}

fn unasked(error: kube::Error) -> Refused {
    Refused::Unasked(error.to_string())
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
                        let known = token == "reader" || token == "stranger";
                        json!({"authenticated": known, "user": {"username": token, "groups": ["g"], "extra": {"k": ["v"]}}})
                    }
                    _ => {
                        let asked = &review["spec"]["nonResourceAttributes"];
                        assert_eq!((&asked["path"], &asked["verb"]), (&json!("/metrics"), &json!("get")));
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
    async fn only_a_known_token_with_the_right_is_let_in() {
        let calls = Arc::new(AtomicUsize::new(0));
        let access = Access::new(server(&calls));
        for nothing in [HeaderMap::new(), with("Basic cmVhZGVy"), with("Bearer "), with("reader")] {
            assert_eq!(access.check(&nothing).await, Err(Refused::Unknown("none")));
        }
        assert_eq!(calls.load(Ordering::Relaxed), 0, "nobody is asked about nothing");
        assert_eq!(access.check(&with("Bearer made-up")).await, Err(Refused::Unknown("another")));
        assert_eq!(access.check(&with("Bearer stranger")).await, Err(Refused::Forbidden("stranger".into())));
        assert_eq!(access.check(&with("Bearer reader")).await, Ok(()));
        let before = calls.load(Ordering::Relaxed);
        assert_eq!(access.check(&with("bearer reader")).await, Ok(()));
        assert_eq!(calls.load(Ordering::Relaxed), before, "asked once a minute");
        assert_eq!(access.check(&with("Bearer stranger")).await, Err(Refused::Forbidden("stranger".into())));
        assert_eq!(calls.load(Ordering::Relaxed), before + 2, "a refusal is not remembered");
    }

    #[tokio::test]
    async fn what_was_let_in_is_forgotten_and_is_never_much() {
        let access = Access::new(server(&Arc::default()));
        let start = Instant::now();
        (0..2 * READERS).for_each(|reader| access.admit(&reader.to_string(), start));
        assert!(access.is_admitted("0", start) && !access.is_admitted("64", start));
        assert!(!access.is_admitted("0", start + HOLDS));
        access.admit("late", start + HOLDS);
        assert_eq!(access.admitted.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_lets_nobody_in() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("down"))
        });
        let access = Access::new(Client::new(service, "default"));
        assert!(matches!(access.check(&with("Bearer reader")).await, Err(Refused::Unasked(_))));
    }
}
