package kit

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Certificate is that of httptest for 127.0.0.1, in files, and a pool that trusts it.
func Certificate(t testing.TB) (certFile, keyFile string, pool *x509.CertPool) {
	own := httptest.NewTLSServer(nil)
	defer own.Close()
	key := NoError(x509.MarshalPKCS8PrivateKey(own.TLS.Certificates[0].PrivateKey))(t)
	write := func(name, kind string, der []byte) (path string) {
		path = filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	pool = x509.NewCertPool()
	pool.AddCert(own.Certificate())
	return write("cert", "CERTIFICATE", own.Certificate().Raw), write("key", "PRIVATE KEY", key), pool
}
