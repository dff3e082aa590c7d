package server_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// freeze makes time stand still, so that answers are exact.
const freeze = "create or replace function ratelimit.clock() returns timestamptz language sql stable as $$ select timestamptz '2030-01-01 00:00:00+00' $$"

func TestGRPC_EachCall(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, freeze)
	s := start(t, db.URL)
	ctx := t.Context()
	same := func(want, got proto.Message, err error) {
		t.Helper()
		require.NoError(t, err)
		require.True(t, proto.Equal(want, got), "want %v\ngot  %v", want, got)
	}
	day := 24 * time.Hour
	left := func(verdict pb.Verdict, remaining int64, retryAfter time.Duration) *pb.Decision {
		return &pb.Decision{
			Verdict: verdict, Remaining: remaining, Capacity: 10,
			RetryAfter: durationpb.New(retryAfter), ResetAfter: durationpb.New(time.Duration(10-remaining) * day),
		}
	}

	d, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
	same(left(pb.Verdict_ALLOWED, 9, 0), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](4), RequestId: ptr("r")})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](4), RequestId: ptr("r")})
	replay := left(pb.Verdict_ALLOWED, 5, 0)
	replay.Replayed = true
	same(replay, d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](7)})
	same(left(pb.Verdict_DENIED, 5, 2*day), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](0)})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Peek(ctx, &pb.PeekRequest{Policy: "api", LogicalKey: "k"})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Settle(ctx, &pb.SettleRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("r"), Cost: ptr[int64](1)})
	same(left(pb.Verdict_ALLOWED, 8, 0), d, err)
	d, err = s.rpc.Charge(ctx, &pb.ChargeRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](9)})
	same(left(pb.Verdict_ALLOWED, -1, 0), d, err)
	d, err = s.rpc.Refund(ctx, &pb.RefundRequest{Policy: "api", LogicalKey: "k", Amount: ptr[int64](5)})
	same(left(pb.Verdict_ALLOWED, 4, 0), d, err)

	never := left(pb.Verdict_DENIED, 4, 0)
	never.RetryAfter = nil
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](11)})
	same(never, d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
	same(&pb.Decision{Verdict: pb.Verdict_ALLOWED, Remaining: 999_999, Capacity: 1_000_000, RetryAfter: durationpb.New(0)}, d, err)

	whole, err := s.rpc.AcquireAll(ctx, &pb.AcquireAllRequest{Charges: []*pb.Charge{
		{Policy: "budget", LogicalKey: "k"}, {Policy: "api", LogicalKey: "k", Cost: ptr[int64](3)},
	}})
	same(&pb.JointDecision{Whole: left(pb.Verdict_ALLOWED, 1, 0), Binding: 1, Decisions: []*pb.Decision{
		{Verdict: pb.Verdict_ALLOWED, Remaining: 999_998, Capacity: 1_000_000, RetryAfter: durationpb.New(0)},
		left(pb.Verdict_ALLOWED, 1, 0),
	}}, whole, err)
}

func TestJSON_EachCall(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, freeze)
	s := start(t, db.URL)
	raw := func(path, body string) string {
		t.Helper()
		response, err := s.http.Post(s.url+path, "application/x-www-form-urlencoded", strings.NewReader(body)) // as curl -d does
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.Equal(t, "application/json", response.Header.Get("Content-Type"))
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return string(text)
	}
	db.Exec(t, "select ratelimit_define_policy('odd', 7, 3, '1 second')")
	for _, call := range [][3]string{
		{"/v1/acquire", `{"policy":"api","key":"k"}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"reset_after":86400,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":true,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":7,"idempotency_key":null}`,
			`{"allowed":false,"remaining":5,"retry_after":172800,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":11}`,
			`{"allowed":false,"remaining":5,"retry_after":null,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"odd","key":"k","cost":5}`,
			`{"allowed":true,"remaining":2,"retry_after":0,"reset_after":1.666667,"capacity":7,"replayed":false,"shadowed":false}`},
		{"/v1/peek", `{"policy":"odd","key":"k","cost":5}`,
			`{"allowed":false,"remaining":2,"retry_after":1,"reset_after":1.666667,"capacity":7,"replayed":false,"shadowed":false}`},
		{"/v1/settle", `{"policy":"api","key":"k","idempotency_key":"i","cost":0}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"reset_after":86400,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/charge", `{"policy":"api","key":"k","cost":12}`,
			`{"allowed":true,"remaining":-3,"retry_after":0,"reset_after":1123200,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/refund", `{"policy":"api","key":"k","amount":8}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"budget","key":"k"}`,
			`{"allowed":true,"remaining":999999,"retry_after":0,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false}`},
		{"/v1/acquire_all", `{"charges":[{"policy":"budget","key":"k"},{"policy":"api","key":"k","cost":2}],"idempotency_key":"all"}`,
			`{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false,"binding":1,"decisions":[` +
				`{"allowed":true,"remaining":999998,"retry_after":0,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false},` +
				`{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false}]}`},
	} {
		require.Equal(t, call[2]+"\n", raw(call[0], call[1]), call[1])
	}
}

// When a caller has no more time, the database does no more work for it.
func TestDeadline_EndsTheWorkOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL)
	_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("r")})
	require.NoError(t, err)
	defer lock(t, db)()
	for name, call := range map[string]func(ctx context.Context) error{
		"acquire": func(ctx context.Context) error {
			_, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
			return err
		},
		"acquire all": func(ctx context.Context) error {
			_, err := s.rpc.AcquireAll(ctx, &pb.AcquireAllRequest{Charges: []*pb.Charge{{Policy: "api", LogicalKey: "k"}}})
			return err
		},
		"charge": func(ctx context.Context) error {
			_, err := s.rpc.Charge(ctx, &pb.ChargeRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](1)})
			return err
		},
		"settle": func(ctx context.Context) error {
			_, err := s.rpc.Settle(ctx, &pb.SettleRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](1), RequestId: ptr("r")})
			return err
		},
		"peek": func(ctx context.Context) error {
			_, err := s.rpc.Peek(ctx, &pb.PeekRequest{Policy: "api", LogicalKey: "k"})
			return err
		},
		"refund": func(ctx context.Context) error {
			_, err := s.rpc.Refund(ctx, &pb.RefundRequest{Policy: "api", LogicalKey: "k", Amount: ptr[int64](1)})
			return err
		},
		"JSON": func(ctx context.Context) error {
			_, err := s.post(ctx, "/v1/acquire", `{"policy":"api","key":"k"}`)
			return err
		},
	} {
		// The caller gives up only when its call waits in the database, however long that takes to come about.
		ctx, giveUp := context.WithCancel(t.Context())
		answered := make(chan error, 1)
		go func() { answered <- call(ctx) }()
		awaitBlocked(t, db, 1)
		giveUp()
		require.Error(t, <-answered, name)
		awaitBlocked(t, db, 0)
	}

	_, err = s.rpc.Acquire(within(t, 50*time.Millisecond), &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	awaitBlocked(t, db, 0)
}

// The deadline that travels with a call, and the bound for calls that have none.
func TestDeadline_OfTheCallOrOfTheServer(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	unlock := lock(t, db)
	defer unlock()
	for _, setting := range []string{"CALL_TIMEOUT=1m", "CALL_TIMEOUT=50ms"} {
		s := start(t, db.URL, setting)
		ctx := t.Context()
		if setting == "CALL_TIMEOUT=1m" {
			ctx = within(t, 50*time.Millisecond)
		}
		_, err := s.rpc.Peek(ctx, &pb.PeekRequest{Policy: "api", LogicalKey: "k"})
		require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
		awaitBlocked(t, db, 0)
	}
}

// What a deadline is to gRPC.
func TestDeadline_InAHeader(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "CALL_TIMEOUT=1m")
	unlock := lock(t, db)
	for _, path := range []string{"/v1/acquire", "/v1/peek"} {
		a, err := s.post(t.Context(), path, `{"policy":"api","key":"k"}`, "Request-Timeout: 0.05")
		require.NoError(t, err)
		require.Equal(t, http.StatusGatewayTimeout, a.status, "%s: %v", path, a.body)
		awaitBlocked(t, db, 0)
	}
	unlock()
	for text, status := range map[string]int{
		"30": http.StatusOK, "999999999": http.StatusOK, "0.000000001": http.StatusGatewayTimeout,
		"0": http.StatusBadRequest, "-1": http.StatusBadRequest, "1s": http.StatusBadRequest, "1e3": http.StatusBadRequest,
		"NaN": http.StatusBadRequest, "1, 2": http.StatusBadRequest, "9999999999": http.StatusBadRequest,
	} {
		a, err := s.post(t.Context(), "/v1/acquire", `{"policy":"api","key":"k"}`, "Request-Timeout: "+text)
		require.NoError(t, err)
		require.Equal(t, status, a.status, "%s: %v", text, a.body)
		if status == http.StatusBadRequest {
			require.Contains(t, a.body["detail"], "Request-Timeout is in seconds")
		}
	}
}

// One caller that gives up takes nothing from those whose requests travel with its own.
func TestDeadline_LeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "DATABASE_CALLS=1")
	unlock := lock(t, db)
	const callers = 40
	answered, left := make(chan error, callers), make(chan error, callers)
	early, giveUp := context.WithCancel(t.Context())
	for i := range callers {
		ctx, answers := t.Context(), answered
		if i%2 == 1 {
			ctx, answers = early, left
		}
		go func() {
			_, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
			answers <- err
		}()
	}
	awaitBlocked(t, db, 1)
	giveUp()
	for range callers / 2 {
		require.Equal(t, codes.Canceled, status.Code(<-left))
	}
	unlock()
	for range callers / 2 {
		require.NoError(t, <-answered)
	}
	require.GreaterOrEqual(t, taken(t, db), int64(callers/2))
}

// A refusal is an error that a request is to blame for, by gRPC and by JSON.
type refusal struct {
	rpc      func(ctx context.Context, c pb.RateLimiterClient) error
	path     string
	body     string
	code     codes.Code
	status   int
	reason   string
	sqlState string
	says     string
}

func TestErrors_OfRequests(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL)
	ctx := t.Context()
	_, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("used")})
	require.NoError(t, err)
	long := strings.Repeat("k", 513)
	charges := make([]*pb.Charge, 1001)
	for i := range charges {
		charges[i] = &pb.Charge{Policy: "api", LogicalKey: "k"}
	}
	acquire := func(q *pb.AcquireRequest) func(context.Context, pb.RateLimiterClient) error {
		return func(ctx context.Context, c pb.RateLimiterClient) error {
			_, err := c.Acquire(ctx, q)
			return err
		}
	}
	all := func(charges ...*pb.Charge) func(context.Context, pb.RateLimiterClient) error {
		return func(ctx context.Context, c pb.RateLimiterClient) error {
			_, err := c.AcquireAll(ctx, &pb.AcquireAllRequest{Charges: charges})
			return err
		}
	}
	settle := func(q *pb.SettleRequest) func(context.Context, pb.RateLimiterClient) error {
		return func(ctx context.Context, c pb.RateLimiterClient) error {
			_, err := c.Settle(ctx, q)
			return err
		}
	}
	for name, r := range map[string]refusal{
		"unknown policy": {
			acquire(&pb.AcquireRequest{Policy: "nobody", LogicalKey: "k"}), "acquire", `{"policy":"nobody","key":"k"}`,
			codes.NotFound, 404, "UNKNOWN_POLICY", "RL001", "unknown policy",
		},
		"no policy": {
			acquire(&pb.AcquireRequest{LogicalKey: "k"}), "acquire", `{"key":"k"}`,
			codes.NotFound, 404, "UNKNOWN_POLICY", "RL001", "unknown policy",
		},
		"unknown policy among others": {
			all(&pb.Charge{Policy: "api", LogicalKey: "k"}, &pb.Charge{Policy: "nobody", LogicalKey: "k"}),
			"acquire_all", `{"charges":[{"policy":"api","key":"k"},{"policy":"nobody","key":"k"}]}`,
			codes.NotFound, 404, "UNKNOWN_POLICY", "RL001", "unknown policy",
		},
		"another cost": {
			acquire(&pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](2), RequestId: ptr("used")}),
			"acquire", `{"policy":"api","key":"k","cost":2,"idempotency_key":"used"}`,
			codes.AlreadyExists, 409, "IDEMPOTENCY_MISMATCH", "RL002", "idempotency key used before with another cost",
		},
		"no grant": {
			settle(&pb.SettleRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](2), RequestId: ptr("unused")}),
			"settle", `{"policy":"api","key":"k","cost":2,"idempotency_key":"unused"}`,
			codes.FailedPrecondition, 404, "NO_GRANT", "RL003", "no live grant",
		},
		"no key": {
			acquire(&pb.AcquireRequest{Policy: "api"}), "acquire", `{"policy":"api"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid key",
		},
		"long key": {
			acquire(&pb.AcquireRequest{Policy: "api", LogicalKey: long}), "acquire", `{"policy":"api","key":"` + long + `"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid key",
		},
		"long key among others": {
			all(&pb.Charge{Policy: "api", LogicalKey: long}), "acquire_all", `{"charges":[{"policy":"api","key":"` + long + `"}]}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid key",
		},
		"zero byte": {
			acquire(&pb.AcquireRequest{Policy: "api", LogicalKey: "a\x00b"}), "acquire", `{"policy":"api","key":"a\u0000b"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "key has a zero byte",
		},
		"negative cost": {
			acquire(&pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](-1)}), "acquire", `{"policy":"api","key":"k","cost":-1}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid cost",
		},
		"empty idempotency key": {
			acquire(&pb.AcquireRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("")}), "acquire", `{"policy":"api","key":"k","idempotency_key":""}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid idempotency_key",
		},
		"no charges": {
			all(), "acquire_all", `{}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid charges",
		},
		"too many charges": {
			all(charges...), "acquire_all", `{"charges":[` + strings.Repeat(`{"policy":"api","key":"k"},`, 1000) + `{"policy":"api","key":"k"}]}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "",
		},
		"charge without a cost": {
			func(ctx context.Context, c pb.RateLimiterClient) error {
				_, err := c.Charge(ctx, &pb.ChargeRequest{Policy: "api", LogicalKey: "k"})
				return err
			}, "charge", `{"policy":"api","key":"k"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid cost",
		},
		"settlement without a cost": {
			settle(&pb.SettleRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("used")}), "settle", `{"policy":"api","key":"k","idempotency_key":"used"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid cost",
		},
		"settlement of nothing": {
			settle(&pb.SettleRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](1)}), "settle", `{"policy":"api","key":"k","cost":1}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid idempotency_key",
		},
		"refund of nothing": {
			func(ctx context.Context, c pb.RateLimiterClient) error {
				_, err := c.Refund(ctx, &pb.RefundRequest{Policy: "api", LogicalKey: "k"})
				return err
			}, "refund", `{"policy":"api","key":"k"}`,
			codes.InvalidArgument, 422, "INVALID_ARGUMENT", "22023", "invalid amount",
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := r.rpc(ctx, s.rpc)
			require.Equal(t, r.code, status.Code(err), "%v", err)
			require.ErrorContains(t, err, r.says)
			requireInfo(t, err, r.reason, r.sqlState)
			a := s.mustPost("/v1/"+r.path, r.body)
			requireProblem(t, a, r.status, r.sqlState)
			require.Contains(t, fmt.Sprint(a.body["title"], a.body["detail"]), r.says)
		})
	}
	peeked, err := s.rpc.Peek(ctx, &pb.PeekRequest{Policy: "api", LogicalKey: "k"})
	require.NoError(t, err)
	require.EqualValues(t, 9, peeked.GetRemaining(), "none of them took anything")
}

// requireBoth makes a call in both protocols that the database is to blame for.
func requireBoth(t *testing.T, s *testServer, code codes.Code, httpStatus int, reason, sqlState string) {
	t.Helper()
	_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "api", LogicalKey: "secret"})
	require.Equal(t, code, status.Code(err), "%v", err)
	requireInfo(t, err, reason, sqlState)
	a := s.mustPost("/v1/acquire", `{"policy":"api","key":"secret"}`)
	requireProblem(t, a, httpStatus, sqlState)
	require.Contains(t, s.log.String(), "call failed", "what callers are not told is in the log")
	require.NotContains(t, s.log.String(), "secret", "but no key")
}

func TestErrors_Locked(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "LOCK_TIMEOUT=10ms")
	defer lock(t, db)()
	requireBoth(t, s, codes.Aborted, 503, "CONTENDED", "55P03")
}

func TestErrors_NoTimeLeft(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "CALL_TIMEOUT=20ms")
	defer lock(t, db)()
	requireBoth(t, s, codes.DeadlineExceeded, 504, "DEADLINE_EXCEEDED", "")
}

func TestErrors_StatementTimeout(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL) // whose own statements take as long as they do
	defer lock(t, db)()
	reconnect(t, s, db, "statement_timeout = '20ms'", "57014")
	requireBoth(t, s, codes.DeadlineExceeded, 504, "DEADLINE_EXCEEDED", "57014")
}

func TestErrors_ReadOnly(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL)
	reconnect(t, s, db, "default_transaction_read_only = on", "25006")
	requireBoth(t, s, codes.Unavailable, 503, "UNAVAILABLE", "25006")
}

// reconnect lets the server's sessions end, so that a setting of the database holds for the next ones. It does when calls fail
// with sqlState: a connection that has just ended is noticed by its next call.
func reconnect(t *testing.T, s *testServer, db *pgtest.DB, setting, sqlState string) {
	t.Helper()
	db.Exec(t, "alter database "+pgx.Identifier{db.Name}.Sanitize()+" set "+setting)
	disconnect(t, db)
	require.Eventually(t, func() bool {
		_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
		return strings.Contains(fmt.Sprint(err), "no answer") && strings.Contains(fmt.Sprint(status.Convert(err).Details()...), sqlState)
	}, 20*time.Second, time.Millisecond)
}

// disconnect ends the server's sessions.
func disconnect(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = 'pgratelimit' and datname = current_database()")
}

func TestErrors_NoPrivilege(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	role := newRole(t, db)
	db.Exec(t, "grant execute on function ratelimit_acquire, ratelimit_acquire_packed to "+role)
	s := start(t, as(t, db, role))
	db.Exec(t, "revoke execute on function ratelimit_acquire from "+role)
	requireBoth(t, s, codes.Internal, 500, "INTERNAL", "42501")
	require.Contains(t, s.log.String(), "grant execute on function ratelimit_acquire(")
}

func TestErrors_NoDatabase(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Private(t)
	db := install(t, postgres)
	s := start(t, db.URL)
	_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
	require.NoError(t, err)
	require.NoError(t, postgres.Stop(t.Context(), true))
	requireBoth(t, s, codes.Unavailable, 503, "UNAVAILABLE", "")
}

func TestErrors_TooManyCalls(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "MAX_CALLS=1")
	unlock := lock(t, db)
	answered := make(chan error, 1)
	go func() {
		_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
		answered <- err
	}()
	awaitBlocked(t, db, 1)
	requireBoth(t, s, codes.ResourceExhausted, 503, "OVERLOADED", "")
	unlock()
	require.NoError(t, <-answered)
	require.EqualValues(t, 1, taken(t, db))
}
