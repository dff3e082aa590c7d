package server_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Calls need one of TOKENS, health and metrics one of MONITORING_TOKENS if there are any. TestAttack_TokensOfEvery… and package
// auth have the forms of a wrong token.
func TestTokens_WhichWayNeedsWhich(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, monitoring := range []string{"", "\nMONITORING_TOKENS=watch"} {
		s := start(t, db.URL, strings.Split("TOKENS=first,second"+monitoring, "\n")...)
		for token, is := range map[string]struct{ caller, monitor bool }{
			"":              {false, monitoring == ""},
			"Bearer wrong":  {false, monitoring == ""},
			"bearer second": {true, monitoring == ""},
			"Bearer watch":  {false, true},
		} {
			ctx := t.Context()
			var headers []string
			if token != "" {
				ctx = metadata.AppendToOutgoingContext(ctx, "authorization", token)
				headers = []string{"Authorization: " + token}
			}
			_, err := s.call(ctx, "acquire", `{"policy":"budget","key":"`+token+`k"}`)
			requireCode(t, is.caller, err, "acquire with "+token)
			_, err = s.methods(ctx)
			requireCode(t, is.caller, err, "reflection with "+token)
			_, err = healthpb.NewHealthClient(s.conn).Check(ctx, &healthpb.HealthCheckRequest{})
			requireCode(t, is.monitor, err, "health with "+token)

			a := s.mustPost("/v1/acquire", `{"policy":"budget","key":"`+token+`k"}`, headers...)
			requireStatus(t, is.caller, a)
			requireStatus(t, is.caller, s.mustPost("/v1/nothing", ``, headers...))
			for _, path := range []string{"/livez", "/healthz", "/metrics"} {
				requireStatus(t, is.monitor, s.get(path, headers...))
			}
		}
		twice := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer first", "authorization", "Bearer first")
		_, err := s.call(twice, "acquire", `{"policy":"budget","key":"k"}`)
		requireCode(t, false, err, "two headers")
	}
}

// Another site can point its name to this machine: a browser then treats the calls of its pages as same-origin. Callers with a
// token, and of other addresses, may use any name.
func TestHost_WithoutTokensIsNoNameOnALoopbackListener(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const call = `{"policy":"budget","key":"k"}`
	s := start(t, db.URL, "STATUS_PAGE=true", "MONITORING_TOKENS=watch", "ENVOY_RULES="+rulesFile(t, edgeRules))
	status := func(s *testServer, method, path, host string) int {
		a := s.mustDo(method, path, call, "Host: "+host, "Authorization: Bearer watch")
		require.Equal(t, a.status == http.StatusForbidden, strings.Contains(a.text, "Without TOKENS"), "%s", a.text)
		return a.status
	}
	for _, host := range []string{"evil.example", "evil.example:8080", "evil.example.", "127.0.0.1.evil.example", "localhost.evil.example:80", "localhost..", "[::1].evil.example"} {
		for path, method := range map[string]string{"/v1/acquire": "POST", "/v1/charge": "POST", "/json": "POST", "/metrics": "GET", "/": "GET", "/v1/nothing": "POST"} {
			require.Equal(t, http.StatusForbidden, status(s, method, path, host), "%s at %s", path, host)
		}
	}
	for _, path := range []string{"/livez", "/healthz"} {
		require.Equal(t, http.StatusOK, status(s, "GET", path, "evil.example"), "health has nothing to hide, and may be asked by the name in HTTP_ADDR")
	}
	require.Zero(t, taken(t, db))
	hosts := []string{"localhost", "LocalHost:8080", "localhost.", "localhost.:80", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8080", "192.0.2.1"}
	for _, host := range hosts {
		require.Equal(t, http.StatusOK, status(s, "POST", "/v1/acquire", host), host)
		require.Equal(t, http.StatusOK, status(s, "GET", "/metrics", host), host)
	}
	require.EqualValues(t, len(hosts), taken(t, db))
	require.Equal(t, http.StatusOK, status(start(t, db.URL, "TOKENS=watch"), "POST", "/v1/acquire", "limits.example"))
	require.Equal(t, http.StatusOK, status(start(t, db.URL, "HTTP_ADDR=0.0.0.0:0"), "POST", "/v1/acquire", "limits.example"))
}

func requireCode(t *testing.T, admitted bool, err error, what string) {
	t.Helper()
	require.Equal(t, admitted, status.Code(err) != codes.Unauthenticated, "%s: %v", what, err)
	if admitted {
		require.NoError(t, err, what)
		return
	}
	requireInfo(t, err, "UNAUTHENTICATED", "")
}

func requireStatus(t *testing.T, admitted bool, a answer) {
	t.Helper()
	require.Equal(t, admitted, a.status != http.StatusUnauthorized)
	if !admitted {
		requireProblem(t, a, http.StatusUnauthorized, "")
		require.Equal(t, "Bearer", a.header.Get("WWW-Authenticate"))
	}
}
