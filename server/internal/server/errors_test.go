package server_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

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
