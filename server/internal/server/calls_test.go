package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// freeze makes time stand still, so that answers are exact.
const freeze = "create or replace function ratelimit.clock() returns timestamptz language sql stable as $$ select timestamptz '2030-01-01 00:00:00+00' $$"

// everyCall has a body for each call. Those of settle and settle_all need a grant under the idempotency key i.
var everyCall = map[string]string{
	"acquire":       `{"policy":"api","key":"k"}`,
	"acquire_all":   `{"charges":[{"policy":"api","key":"k"}]}`,
	"acquire_many":  `{"requests":[{"policy":"api","key":"k"}]}`,
	"acquire_up_to": `{"policy":"api","key":"k","at_most":1}`,
	"reserve":       `{"policy":"api","key":"k","max_wait":60}`,
	"charge":        `{"policy":"api","key":"k","cost":1}`,
	"settle":        `{"policy":"api","key":"k","cost":1,"idempotency_key":"i"}`,
	"settle_all":    `{"settlements":[{"policy":"api","key":"k","cost":1}],"idempotency_key":"i"}`,
	"peek":          `{"policy":"api","key":"k"}`,
	"refund":        `{"policy":"api","key":"k","amount":1}`,
	"pause":         `{"policy":"api","key":"k","pause_for":1}`,
	"hold":          `{"policy":"jobs","key":"k","holder":"h"}`,
	"renew":         `{"policy":"jobs","key":"k","holder":"h"}`,
	"release":       `{"policy":"jobs","key":"k","holder":"h"}`,
}

// asJSON has the values of an answer by gRPC as the call by JSON writes them.
func asJSON(t *testing.T, answer protoreflect.Message) map[string]any {
	values := make(map[string]any)
	fields, isAnswer := answer.Descriptor().Fields(), answer.Descriptor().Name() == "Answer"
	for i := range fields.Len() {
		field := fields.Get(i)
		name, value := string(field.Name()), answer.Get(field)
		switch {
		case name == "verdict":
			require.NotZero(t, value.Enum())
			values["allowed"] = value.Enum() == pb.Verdict_ALLOWED.Number()
		case field.IsList():
			list := []any{}
			for i := range value.List().Len() {
				list = append(list, asJSON(t, value.List().Get(i).Message()))
			}
			values[name] = list
		case isAnswer && !answer.Has(field), name == "estimated" && !value.Bool():
		case field.Message() == nil:
			values[name] = value.Interface()
		case field.Message().Name() == "Duration" && !answer.Has(field):
			values[name] = nil
		case field.Message().Name() == "Duration":
			values[name] = jsonapi.Seconds(value.Message().Interface().(*durationpb.Duration).AsDuration())
		case isAnswer:
			values[name] = asJSON(t, value.Message())
		default: // the decision of the whole
			maps.Copy(values, asJSON(t, value.Message()))
		}
	}
	return values
}

// decided is a decision in JSON that is neither replayed nor shadowed.
func decided(allowed bool, remaining int, retryAfter, resetAfter string, capacity int) string {
	return fmt.Sprintf(`{"allowed":%t,"remaining":%d,"retry_after":%s,"reset_after":%s,"capacity":%d,"replayed":false,"shadowed":false}`,
		allowed, remaining, retryAfter, resetAfter, capacity)
}

func TestCalls_AnswerAlikeByGRPCAndByJSON(t *testing.T) {
	t.Parallel()
	var servers [2]*testServer
	for i := range servers {
		db := newDB(t)
		db.Exec(t, freeze)
		db.Exec(t, "select ratelimit_define_policy('odd', 7, 3, '1 second'); select ratelimit_define_policy('watched', 1, lease => '1 day', shadow => true)")
		servers[i] = start(t, db.URL)
	}
	for _, call := range [][3]string{
		{"acquire", `{"policy":"api","key":"k"}`, decided(true, 9, "0", "86400", 10)},
		{"acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`, decided(true, 5, "0", "432000", 10)},
		{"acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`,
			strings.Replace(decided(true, 5, "0", "432000", 10), `"replayed":false`, `"replayed":true`, 1)},
		{"acquire", `{"policy":"api","key":"k","cost":7,"idempotency_key":null}`, decided(false, 5, "172800", "432000", 10)},
		{"acquire", `{"policy":"api","key":"k","cost":0}`, decided(true, 5, "0", "432000", 10)},
		{"acquire", `{"policy":"api","key":"k","cost":11}`, decided(false, 5, "null", "432000", 10)},
		{"acquire", `{"policy":"odd","key":"k","cost":5}`, decided(true, 2, "0", "1.666667", 7)},
		{"peek", `{"policy":"odd","key":"k","cost":5}`, decided(false, 2, "1", "1.666667", 7)},
		{"settle", `{"policy":"api","key":"k","idempotency_key":"i","cost":0}`, decided(true, 9, "0", "86400", 10)},
		{"charge", `{"policy":"api","key":"k","cost":12}`, decided(true, -3, "0", "1123200", 10)},
		{"refund", `{"policy":"api","key":"k","amount":8}`, decided(true, 5, "0", "432000", 10)},
		{"pause", `{"policy":"odd","key":"paused","pause_for":1.5}`, decided(false, 0, "1.833334", "3.833334", 7)},
		{"acquire", `{"policy":"budget","key":"k"}`, decided(true, 999999, "0", "null", 1000000)},
		{"acquire_all", `{"charges":[{"policy":"budget","key":"k"},{"policy":"api","key":"k","cost":2}],"idempotency_key":"all"}`,
			`{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false,"binding":1,"decisions":[` +
				decided(true, 999998, "0", "null", 1000000) + "," + decided(true, 3, "0", "604800", 10) + "]}"},
		{"acquire_many", `{"requests":[{"policy":"budget","key":"k","cost":8},{"policy":"api","key":"k","cost":4,"idempotency_key":"m"},{"policy":"api","key":"k","cost":2,"idempotency_key":"all"}]}`,
			`{"answers":[` +
				`{"decision":{"allowed":true,"remaining":999990,"retry_after":0,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false}},` +
				`{"decision":{"allowed":false,"remaining":3,"retry_after":86400,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false}},` +
				`{"decision":{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":true,"shadowed":false}}]}`},
		{"settle_all", `{"settlements":[{"policy":"budget","key":"k","cost":1},{"policy":"api","key":"k","cost":2}],"idempotency_key":"all"}`,
			`{"replayed":false,"decisions":[` + decided(true, 999990, "0", "null", 1000000) + "," + decided(true, 3, "0", "604800", 10) + "]}"},
		{"acquire_up_to", `{"policy":"api","key":"k","at_most":8,"at_least":4}`,
			`{"allowed":false,"remaining":3,"retry_after":86400,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false,"taken":0}`},
		{"acquire_up_to", `{"policy":"api","key":"k","at_most":8,"idempotency_key":"up"}`,
			`{"allowed":true,"remaining":0,"retry_after":0,"reset_after":864000,"capacity":10,"replayed":false,"shadowed":false,"taken":3}`},
		{"reserve", `{"policy":"odd","key":"k","cost":4,"max_wait":0.6}`,
			`{"allowed":false,"wait":0.666667,"remaining":2,"reset_after":1.666667,"capacity":7,"replayed":false,"shadowed":false}`},
		{"reserve", `{"policy":"odd","key":"k","cost":4,"max_wait":0.666667,"idempotency_key":"r"}`,
			`{"allowed":true,"wait":0.666667,"remaining":-2,"reset_after":3,"capacity":7,"replayed":false,"shadowed":false}`},
		{"reserve", `{"policy":"budget","key":"k","cost":1000001,"max_wait":1}`,
			`{"allowed":false,"wait":null,"remaining":999990,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false}`},
		{"hold", `{"policy":"jobs","key":"k","holder":"h"}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"held_for":60,"capacity":10,"renewed":false,"shadowed":false}`},
		{"hold", `{"policy":"jobs","key":"k","holder":"h","cost":null}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"held_for":60,"capacity":10,"renewed":true,"shadowed":false}`},
		{"hold", `{"policy":"jobs","key":"k","holder":"i","cost":10}`,
			`{"allowed":false,"remaining":9,"retry_after":60,"held_for":0,"capacity":10,"renewed":false,"shadowed":false}`},
		{"hold", `{"policy":"jobs","key":"k","holder":"i","cost":11}`,
			`{"allowed":false,"remaining":9,"retry_after":null,"held_for":0,"capacity":10,"renewed":false,"shadowed":false}`},
		{"peek", `{"policy":"jobs","key":"k"}`, decided(true, 9, "0", "60", 10)},
		{"renew", `{"policy":"jobs","key":"k","holder":"h"}`, `{"held_for":60}`},
		{"renew", `{"policy":"jobs","key":"k","holder":"i"}`, `{"held_for":null}`},
		{"release", `{"policy":"jobs","key":"k","holder":"h"}`, `{"released":true}`},
		{"release", `{"policy":"jobs","key":"k","holder":"h"}`, `{"released":false}`},
		{"hold", `{"policy":"watched","key":"k","holder":"h","cost":2}`,
			`{"allowed":true,"remaining":1,"retry_after":0,"held_for":86400,"capacity":1,"renewed":false,"shadowed":true}`},
	} {
		answer := kit.NoError(servers[0].call(t.Context(), call[0], call[1]))(t)
		text := kit.NoError(json.Marshal(asJSON(t, answer.ProtoReflect())))(t)
		require.JSONEq(t, call[2], string(text), call[1])
		a := servers[1].mustPost("/v1/"+call[0], call[1], "Content-Type: application/x-www-form-urlencoded") // as curl -d does
		require.Equal(t, http.StatusOK, a.status)
		require.Equal(t, "application/json", a.header.Get("Content-Type"))
		require.Equal(t, call[2]+"\n", a.text, call[1])
	}
}

func TestDeadline_EndsTheWorkOfTheDatabase(t *testing.T) {
	db, s := parallel(t)
	require.NoError(t, kit.ErrorOf(s.call(t.Context(), "acquire", `{"policy":"api","key":"k","idempotency_key":"i"}`)))
	defer lock(t, db)()
	// The caller gives up only when its call waits in the database, however long that takes to come about.
	requireEnded := func(begin func(ctx context.Context) <-chan error, name string) {
		ctx, giveUp := context.WithCancel(t.Context())
		answered := begin(ctx)
		awaitBlocked(t, db, 1)
		giveUp()
		require.Error(t, <-answered, name)
		awaitBlocked(t, db, 0)
	}
	for path, body := range everyCall {
		requireEnded(func(ctx context.Context) <-chan error { return s.begin(ctx, path, body) }, path)
	}
	requireEnded(func(ctx context.Context) <-chan error {
		return s.beginPost(ctx, "/v1/acquire", `{"policy":"api","key":"k"}`)
	}, "JSON")
	requireEnded(func(ctx context.Context) <-chan error {
		stream := s.stream(ctx)
		stream.send(1, "k", "l")
		return beside(func() error { return kit.ErrorOf(stream.Recv()) })
	}, "a stream")
}

// Request-Timeout is a deadline. TestTimeout_IsANumberOfSeconds has its forms.
func TestDeadline_InAHeader(t *testing.T) {
	db, s := parallel(t, "CALL_TIMEOUT=1m")
	a := s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`, "Request-Timeout: 1s")
	require.Equal(t, http.StatusBadRequest, a.status)
	require.Contains(t, a.body["detail"], "Request-Timeout is in seconds")
	defer lock(t, db)()
	for _, path := range []string{"/v1/acquire", "/v1/peek"} {
		a := s.mustPost(path, `{"policy":"api","key":"k"}`, "Request-Timeout: 0.05")
		require.Equal(t, http.StatusGatewayTimeout, a.status, "%s: %v", path, a.body)
		awaitBlocked(t, db, 0)
	}
}

// A refusal is the same by gRPC and by JSON, and takes nothing.
func TestErrors_OfRequests(t *testing.T) {
	_, s := parallel(t)
	require.NoError(t, kit.ErrorOf(s.call(t.Context(), "acquire", `{"policy":"api","key":"k","idempotency_key":"used"}`)))
	require.NoError(t, kit.ErrorOf(s.call(t.Context(), "hold", `{"policy":"jobs","key":"k","holder":"used"}`)))
	for name, r := range map[string]struct {
		path, body     string
		kind           *service.Kind
		sqlState, says string
	}{
		"unknown policy":             {"acquire", `{"policy":"nobody","key":"k"}`, service.UnknownPolicy, "RL001", "unknown policy"},
		"no policy":                  {"acquire", `{"key":"k"}`, service.UnknownPolicy, "RL001", "unknown policy"},
		"another cost":               {"acquire", `{"policy":"api","key":"k","cost":2,"idempotency_key":"used"}`, service.IdempotencyMismatch, "RL002", "idempotency key used before with another cost"},
		"no grant":                   {"settle", `{"policy":"api","key":"k","cost":2,"idempotency_key":"unused"}`, service.NoGrant, "RL003", "no live grant"},
		"no key":                     {"acquire", `{"policy":"api"}`, service.InvalidArgument, "22023", "invalid key"},
		"zero byte":                  {"acquire", `{"policy":"api","key":"a\u0000b"}`, service.InvalidArgument, "22023", "a text has a zero byte"},
		"negative cost":              {"acquire", `{"policy":"api","key":"k","cost":-1}`, service.InvalidArgument, "22023", "invalid cost"},
		"no charges":                 {"acquire_all", `{}`, service.InvalidArgument, "22023", "invalid charges"},
		"charge without a cost":      {"charge", `{"policy":"api","key":"k"}`, service.InvalidArgument, "22023", "invalid cost"},
		"no settlements":             {"settle_all", `{"idempotency_key":"i"}`, service.InvalidArgument, "22023", "invalid settlements"},
		"settlements of nothing":     {"settle_all", `{"settlements":[{"policy":"api","key":"k","cost":1}]}`, service.InvalidArgument, "22023", "invalid idempotency_key"},
		"settlement without a cost":  {"settle", `{"policy":"api","key":"k","idempotency_key":"used"}`, service.InvalidArgument, "22023", "invalid cost"},
		"settlement of nothing":      {"settle", `{"policy":"api","key":"k","cost":1}`, service.InvalidArgument, "22023", "invalid idempotency_key"},
		"many of none":               {"acquire_many", `{}`, service.InvalidArgument, "22023", "requests has 0 elements. Send 1 to 1000"},
		"too many requests":          {"acquire_many", `{"requests":[` + strings.Repeat(`{"policy":"api","key":"k"},`, 1000) + `{"policy":"api","key":"k"}]}`, service.InvalidArgument, "22023", "requests has 1001 elements"},
		"up to nothing":              {"acquire_up_to", `{"policy":"api","key":"k"}`, service.InvalidArgument, "22023", "invalid at_most"},
		"reservation without an end": {"reserve", `{"policy":"api","key":"k"}`, service.InvalidArgument, "22023", "invalid max_wait"},
		"reservation of 317 years":   {"reserve", `{"policy":"api","key":"k","max_wait":10000000000}`, service.InvalidArgument, "22023", "max_wait is 1"},
		"pause of 317 years":         {"pause", `{"policy":"api","key":"k","pause_for":10000000000}`, service.InvalidArgument, "22023", "pause_for is 1"},
		"pause that ended":           {"pause", `{"policy":"api","key":"k","pause_for":-10000000000}`, service.InvalidArgument, "22023", "pause_for is -1"},
		"hold at another cost":       {"hold", `{"policy":"jobs","key":"k","holder":"used","cost":2}`, service.IdempotencyMismatch, "RL002", "the holder holds with another cost"},
		"hold of nothing":            {"hold", `{"policy":"jobs","key":"k","holder":"h","cost":0}`, service.InvalidArgument, "22023", "invalid cost"},
		"zero byte in a holder":      {"hold", `{"policy":"jobs","key":"k","holder":"a\u0000b"}`, service.InvalidArgument, "22023", "a text has a zero byte"},
		"pause without end":          {"pause", `{"policy":"api","key":"k"}`, service.InvalidArgument, "22023", "invalid pause_for"},
		"refund of nothing":          {"refund", `{"policy":"api","key":"k"}`, service.InvalidArgument, "22023", "invalid amount"},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := requireError(t, s, r.path, r.body, r.kind, r.sqlState)
			require.ErrorContains(t, err, r.says)
			require.Contains(t, fmt.Sprint(a.body["title"], " ", a.body["detail"], " ", a.body["hint"]), r.says)
		})
	}
	require.EqualValues(t, 9, s.remaining("api", "k"), "none of them took anything")
	require.EqualValues(t, 9, s.remaining("jobs", "k"))
}

// requireError makes a call in both protocols, which fails. What code each of them has for a kind, TestKinds_HaveCodes tells.
func requireError(t *testing.T, s *testServer, path, body string, kind *service.Kind, sqlState string) (answer, error) {
	_, err := s.call(t.Context(), path, body)
	require.Equal(t, kind.Code, status.Code(err), "%v", err)
	requireInfo(t, err, kind.Reason, sqlState)
	a := s.mustPost("/v1/"+path, body)
	requireProblem(t, a, kind.Status, sqlState)
	return a, err
}

// requireFault makes a call in both protocols whose error the database is to blame for.
func requireFault(t *testing.T, s *testServer, kind *service.Kind, sqlState string) {
	_, _ = requireError(t, s, "acquire", `{"policy":"api","key":"secret"}`, kind, sqlState)
	require.Contains(t, s.log.String(), "call failed", "what callers are not told is in the log")
	require.NotContains(t, s.log.String(), "secret", "but no key")
}

func TestErrors_OfTheDatabase(t *testing.T) {
	type testCase struct {
		setting  string
		kind     *service.Kind
		sqlState string
	}
	kit.InParallel(t, map[string]testCase{
		"a lock is held too long": {"LOCK_TIMEOUT=10ms", service.Contended, "55P03"},
		"the call has no time":    {"CALL_TIMEOUT=20ms", service.DeadlineExceeded, ""},
	}, func(t *testing.T, test testCase) {
		db := newDB(t)
		s := start(t, db.URL, test.setting)
		defer lock(t, db)()
		requireFault(t, s, test.kind, test.sqlState)
	})
}

// TestDenialCache of the client has what is repeated, and for how long.
func TestDenialCache_RepeatsDenialsOnlyIfSet(t *testing.T) {
	t.Parallel()
	for setting, repeats := range map[string]bool{"NO_FLUSH=false": false, "DENIAL_CACHE=true": true} {
		db := newDB(t)
		s := start(t, db.URL, setting)
		const body = `{"policy":"api","key":"k","cost":10}`
		for _, allowed := range []bool{true, false, !repeats} {
			require.Equal(t, allowed, s.mustPost("/v1/acquire", body).body["allowed"])
			if !allowed {
				db.Exec(t, "select ratelimit_refund('api', 'k', 10)")
			}
		}
	}
}

func TestErrors_NoPrivilege(t *testing.T) {
	t.Parallel()
	db, role, url := newRole(t, "ratelimit_acquire, ratelimit_acquire_packed")
	s := start(t, url)
	db.Exec(t, "revoke execute on function ratelimit_acquire from "+role)
	requireFault(t, s, service.Internal, "42501")
	require.Contains(t, s.log.String(), "grant execute on function ratelimit_acquire(")
}

func TestErrors_NoDatabase(t *testing.T) {
	db, postgres := newPrivateDB(t)
	s := start(t, db.URL)
	s.acquire("api", "k")
	kit.OnServer(t, postgres, "", "alter database "+db.Name+" allow_connections false")
	kit.OnServer(t, postgres, "", "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pgratelimit'")
	isConnecting := func() bool {
		return s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`).body["sqlstate"] == "55000"
	}
	require.Eventually(t, isConnecting, time.Minute, time.Millisecond, "when all connections are known to have ended")
	requireFault(t, s, service.Unavailable, "55000")
	require.NoError(t, postgres.Stop(t.Context(), true))
	requireFault(t, s, service.Unavailable, "")
}

// A key names the same bucket by gRPC, by JSON and by SQL.
func TestKeys_OfEveryKind(t *testing.T) {
	db, s := parallel(t)
	keys := []string{" ", "\x01\x7f", "\ufffd", "é", "e\u0301", "\u202e", "😀", `"\`, "'; drop table ratelimit.buckets; --", "$1", "null", "{}", "%00", "a/b?c#d", strings.Repeat("é", 256)}
	for _, key := range keys {
		require.EqualValues(t, 999_999, s.acquire("budget", key).GetRemaining(), "%q: a bucket of its own", key)
		text := kit.NoError(json.Marshal(key))(t)
		a := s.mustPost("/v1/acquire", fmt.Sprintf(`{"policy":"budget","key":%s}`, text))
		require.EqualValues(t, 999_998, a.body["remaining"], "%q", key)
		remaining := kit.One[int64](t, db.Pool, "select remaining from ratelimit_peek('budget', $1)", key)
		require.EqualValues(t, 999_998, remaining, "%q", key)
	}
}

func manyRequests(policy string, keys ...string) (list []*pb.Request) {
	for _, key := range keys {
		list = append(list, &pb.Request{Policy: policy, LogicalKey: key})
	}
	return list
}

// A refusal belongs to its request, names it, and is the same by gRPC and by JSON.
func TestAcquireMany_ABadRequestDoesNotFailTheOthers(t *testing.T) {
	db, s := parallel(t)
	require.NoError(t, kit.ErrorOf(s.call(t.Context(), "acquire", `{"policy":"api","key":"k","idempotency_key":"used"}`)))
	const good = `{"policy":"api","key":"k"},`
	for bad, want := range map[string]struct {
		kind        *service.Kind
		state, says string
	}{
		`{"policy":"nobody","key":"k"}`:        {service.UnknownPolicy, "RL001", "No policy is named 'nobody'"},
		`{"key":"k"}`:                          {service.UnknownPolicy, "RL001", "No policy is named 'default'"},
		`{"policy":"api","key":"k","cost":-1}`: {service.InvalidArgument, "22023", "requests[1].cost is -1"},
		`{"policy":"api"}`:                     {service.InvalidArgument, "22023", "requests[1].key is empty"},
		`{"policy":"api","key":"` + strings.Repeat("k", 513) + `"}`:    {service.InvalidArgument, "22023", "requests[1].key is 513 bytes"},
		`{"policy":"api","key":"a\u0000b"}`:                            {service.InvalidArgument, "22023", "requests[1]: "},
		`{"policy":"api","key":"k","idempotency_key":""}`:              {service.InvalidArgument, "22023", "requests[1].idempotency_key is"},
		`{"policy":"api","key":"k","cost":2,"idempotency_key":"used"}`: {service.IdempotencyMismatch, "RL002", "used before with another cost"},
	} {
		body := `{"requests":[` + good + bad + `,{"policy":"budget","key":"k"}]}`
		db.Exec(t, "select ratelimit_reset('api', 'k')")
		out := kit.NoError(s.call(t.Context(), "acquire_many", body))(t)
		answers := out.(*pb.Answers).GetAnswers()
		require.Len(t, answers, 3)
		require.Equal(t, pb.Verdict_ALLOWED, answers[0].GetDecision().GetVerdict())
		require.Equal(t, pb.Verdict_ALLOWED, answers[2].GetDecision().GetVerdict())
		e := answers[1].GetError()
		require.Equal(t, []any{int32(want.kind.Code), want.kind.Reason, want.state}, []any{e.GetCode(), e.GetReason(), e.GetSqlstate()}, "%s: %v", bad, e)
		require.Contains(t, e.GetMessage(), want.says)

		a := s.mustPost("/v1/acquire_many", body)
		require.Equal(t, http.StatusOK, a.status)
		inJSON := a.body["answers"].([]any)
		require.NotContains(t, inJSON[0], "error")
		problem := inJSON[1].(map[string]any)["error"].(map[string]any)
		require.EqualValues(t, want.kind.Status, problem["status"])
		require.Equal(t, want.state, problem["sqlstate"])
		require.Contains(t, fmt.Sprint(problem["title"], problem["detail"]), want.says)
	}
}

// A thousand requests in one message are a few calls to the database: each takes 256, or at least half of those that wait.
func TestAcquireMany_RequestsShareCalls(t *testing.T) {
	db, s := parallel(t)
	var keys []string
	for i := range 1000 {
		keys = append(keys, fmt.Sprint("k", i))
	}
	out := kit.NoError(s.rpc.AcquireMany(t.Context(), &pb.AcquireManyRequest{Requests: manyRequests("budget", keys...)}))(t)
	for i, a := range out.GetAnswers() {
		require.EqualValues(t, 999_999, a.GetDecision().GetRemaining(), keys[i])
	}
	require.EqualValues(t, 1000, taken(t, db))
	samples := scrape(s)
	require.Equal(t, "1000", samples[`ratelimit_requests_total{policy="budget",result="allowed"}`])
	require.Equal(t, "1000", samples[`ratelimit_server_calls_total{code="OK",operation="acquire_many"}`])
	require.Equal(t, "1000", samples["ratelimit_combiner_batch_size_sum"])
	require.Contains(t, []string{"4", "5", "6", "7"}, samples["ratelimit_combiner_batch_size_count"])
}

// A stream is one of AcquireStream, whose answers come by their ids.
type stream struct {
	t testing.TB
	pb.RateLimiter_AcquireStreamClient
}

func (s *testServer) stream(ctx context.Context) stream {
	conn := kit.NoError(s.rpc.AcquireStream(ctx))(s.t)
	return stream{s.t, conn}
}

func (s stream) send(id uint64, keys ...string) {
	require.NoError(s.t, s.Send(&pb.AcquireStreamRequest{Id: id, Requests: manyRequests("budget", keys...)}))
}

// granted reads an answer, all of whose decisions are grants, and returns its id.
func (s stream) granted() uint64 {
	out := kit.NoError(s.Recv())(s.t)
	require.NotEmpty(s.t, out.GetAnswers())
	for _, a := range out.GetAnswers() {
		require.Equal(s.t, pb.Verdict_ALLOWED, a.GetDecision().GetVerdict(), "%v", out)
	}
	return out.GetId()
}

func TestStream_ALockedBucketHoldsUpItsOwnMessageOnly(t *testing.T) {
	db := parallelDB(t)
	unlock := hold(t, db, "select ratelimit_acquire('budget', 'locked')")
	s := start(t, db.URL)
	stream := s.stream(t.Context())
	stream.send(7, "free", "locked")
	awaitBlocked(t, db, 1)
	for id := range uint64(5) {
		stream.send(id, "k", "l")
		require.Equal(t, id, stream.granted())
	}
	unlock()
	require.EqualValues(t, 7, stream.granted())
	require.NoError(t, stream.CloseSend())
	_, err := stream.Recv()
	require.Equal(t, io.EOF, err)
	require.EqualValues(t, 12, taken(t, db))
}

// A server that stops answers what it has read, and says that it has not read the rest.
func TestStream_StopAnswersWhatWasRead(t *testing.T) {
	db, s := parallel(t)
	stream, idle := s.stream(t.Context()), s.stream(t.Context())
	idle.send(1, "idle")
	require.EqualValues(t, 1, idle.granted())
	unlock := lock(t, db)
	stream.send(1, "k")
	awaitBlocked(t, db, 1)
	stopped := beside(s.stop)
	_, err := idle.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	requireInfo(t, err, "STOPPING", "")
	_ = stream.Send(&pb.AcquireStreamRequest{Id: 2, Requests: manyRequests("budget", "k")}) // the stream may have ended
	require.Empty(t, stopped)
	unlock()
	require.EqualValues(t, 1, stream.granted())
	_, err = stream.Recv()
	requireInfo(t, err, "STOPPING", "")
	require.NoError(t, <-stopped)
	require.EqualValues(t, 2, taken(t, db), "what has no answer has taken nothing")
}

// Without the bound, MAX_CALLS would refuse messages.
func TestStream_IsReadNoFurtherWhileAHundredMessagesAreUnderWay(t *testing.T) {
	db, s := parallel(t, "MAX_CALLS=100")
	stream := s.stream(t.Context())
	unlock := lock(t, db)
	const messages = 300
	for id := range uint64(messages) {
		stream.send(id, "k")
	}
	require.Eventually(t, func() bool { return scrape(s)["ratelimit_server_calls_under_way"] == "100" }, time.Minute, time.Millisecond)
	unlock()
	for range messages {
		stream.granted()
	}
	require.EqualValues(t, messages, taken(t, db))
}

// A message is a call: MAX_CALLS and CALL_TIMEOUT hold for it. The stream goes on.
func TestStream_LimitsHoldForEachMessage(t *testing.T) {
	db := parallelDB(t)
	unlock := lock(t, db)
	stream := start(t, db.URL, "MAX_CALLS=1", "CALL_TIMEOUT=1m", "LOCK_TIMEOUT=1m", "MAX_MESSAGE_BYTES=100000").stream(t.Context())
	stream.send(1, "k")
	awaitBlocked(t, db, 1)
	stream.send(2, "l")
	stream.refused(2, codes.ResourceExhausted, "OVERLOADED")
	unlock()
	require.EqualValues(t, 1, stream.granted())
	stream.send(3)
	stream.refused(3, codes.InvalidArgument, "INVALID_ARGUMENT")
	stream.send(4, make([]string, 1001)...)
	stream.refused(4, codes.InvalidArgument, "INVALID_ARGUMENT")
	stream.send(5, "k")
	require.EqualValues(t, 5, stream.granted())
	stream.send(6, strings.Repeat("k", 100_000))
	_, err := stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.EqualValues(t, 2, taken(t, db))

	defer lock(t, db)()
	stream = start(t, db.URL, "CALL_TIMEOUT=50ms").stream(t.Context())
	for id := range uint64(2) {
		stream.send(id, "k")
		stream.refused(id, codes.DeadlineExceeded, "DEADLINE_EXCEEDED")
	}
}

// refused receives the error of a message, or of its only request.
func (s *stream) refused(id uint64, code codes.Code, reason string) {
	out := kit.NoError(s.Recv())(s.t)
	require.Equal(s.t, id, out.GetId())
	e := out.GetError()
	if e == nil {
		require.Len(s.t, out.GetAnswers(), 1)
		e = out.GetAnswers()[0].GetError()
	}
	require.Equal(s.t, []any{int32(code), reason}, []any{e.GetCode(), e.GetReason()}, "%v", out)
}

func TestDocs_NameEveryCall(t *testing.T) {
	t.Parallel()
	page := string(kit.NoError(os.ReadFile("../../../docs/server.md"))(t))
	for call := range everyCall {
		require.Contains(t, page, "`/v1/"+call+"`")
	}
}
