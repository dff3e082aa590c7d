package server_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

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
