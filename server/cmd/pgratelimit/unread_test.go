package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// An encoded message is sent as it is, and an answer is not decoded.
type encoded struct{}

func (encoded) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (encoded) Unmarshal([]byte, any) error   { return nil }
func (encoded) Name() string                  { return "proto" }

// megabytes returns a line of /proc/PID/status.
func (p *process) megabytes(t *testing.T, name string) int {
	text := kit.NoError(os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Process.Pid)))(t)
	found := regexp.MustCompile(name + `:\s+(\d+) kB`).FindSubmatch(text)
	require.NotNil(t, found)
	return kit.NoError(strconv.Atoi(string(found[1])))(t) >> 10
}

// A thousand clients send messages of a thousand requests, and read no answer. A message fits into the window of its stream: what is being
// received of longer ones is not bounded.
func TestServe_AnswersThatNobodyReadsTakeBoundedMemory(t *testing.T) {
	const connections, streams, most = 10, 100, 300
	db := kit.ParallelDB(t).DB
	program := filepath.Join(t.TempDir(), "pgratelimit") // this one may have the race detector, which takes memory
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for name, length := range map[string]int{"short": 3, "long": 25} {
		q := &pb.AcquireStreamRequest{Id: 1}
		for range 1000 {
			q.Requests = append(q.Requests, &pb.Request{Policy: strings.Repeat("p", length), LogicalKey: strings.Repeat("k", length)})
		}
		message := kit.NoError(proto.Marshal(q))(t)
		p := serveBy(t, program, "DATABASE_URL="+db.URL, "GRPC_ADDR=127.0.0.1:0")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var clients sync.WaitGroup
		for range connections {
			conn := kit.NoError(grpc.NewClient(p.grpc, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
			defer conn.Close()
			for range streams {
				clients.Go(func() {
					stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, pb.RateLimiter_AcquireStream_FullMethodName, grpc.ForceCodec(encoded{}))
					for sent := 0; err == nil && sent < 130_000; sent += len(message) {
						err = stream.SendMsg(&message) // until the server reads no more, or ends the connection
					}
				})
			}
		}
		ended := make(chan struct{})
		go func() {
			clients.Wait()
			close(ended)
		}()
		isAnswered := func() bool { // what the server has read
			select {
			case <-ended:
				_, text := p.ask(t, "/metrics", "")
				return strings.Contains(text, "ratelimit_server_calls_under_way 0\n")
			default:
				return false
			}
		}
		for !isAnswered() {
			if now := p.megabytes(t, "VmRSS"); now > most {
				require.NoError(t, p.Process.Kill())
				t.Fatalf("%s names: %d MB", name, now)
			}
			time.Sleep(10 * time.Millisecond) // until the next look
		}
		t.Logf("%s names: messages of %d bytes, at most %d MB", name, len(message), p.megabytes(t, "VmHWM"))
		require.LessOrEqual(t, p.megabytes(t, "VmHWM"), most)
		require.Eventually(t, func() bool { // when it has answered what it has read
			_, text := p.ask(t, "/v1/acquire", `{"policy":"nobody","key":"k"}`)
			return strings.Contains(text, "RL001")
		}, time.Minute, 10*time.Millisecond)
	}
}
