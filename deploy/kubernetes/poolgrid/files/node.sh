#!/usr/bin/env bash
# One pod of an engine that spans nodes, in a group of a LeaderWorkerSet: node.sh GPUS DRAIN_S poolgrid worker ...
# The first pod starts a rank for each GPU of all pods with mpirun, over ssh; the others serve ssh until they are ended.
# All have the same key, which also proves who serves.
set -euo pipefail
gpus=$1 drain_s=$2 port=2222
shift 2
keys=${KEYS:-/tmp/ssh}
mkdir -p -m 700 "$keys"
install -m 600 "${SSH_SECRET:-/etc/poolgrid/ssh/ssh-privatekey}" "$keys/key"
ssh-keygen -y -f "$keys/key" >"$keys/authorized"
if ((LWS_WORKER_INDEX > 0)); then
    # sshd wants to be started by its whole path.
    exec "$(PATH=$PATH:/usr/sbin command -v sshd)" -D -e -f /dev/null -p "$port" -h "$keys/key" \
        -o AuthorizedKeysFile="$keys/authorized" -o PidFile=none -o StrictModes=no -o UsePAM=no -o PasswordAuthentication=no
fi
echo "* $(cat "$keys/authorized")" >"$keys/known"
printf '%s\n' "Port $port" "IdentityFile $keys/key" "UserKnownHostsFile $keys/known" 'BatchMode yes' 'ConnectTimeout 5' \
    >"$keys/config"
hosts=$(hostname):$gpus
for ((at = 1; at < LWS_GROUP_SIZE; at++)); do
    host=${LWS_LEADER_ADDRESS%%.*}-$at.${LWS_LEADER_ADDRESS#*.}
    # The startup probe ends a wait that is too long.
    until ssh -F "$keys/config" "$host" true; do sleep 2; done
    hosts+=,$host:$gpus
done
variables=()
for each in $(compgen -e); do
    case $each in
        HOSTNAME | HOME | PWD | OLDPWD | SHLVL | _ | LWS_*) ;;
        *) variables+=(-x "$each") ;;
    esac
done
# By its whole path it finds its parts on the other nodes. Its ranks have the time of the drain when it is ended.
exec "$(command -v mpirun)" -np "$((gpus * LWS_GROUP_SIZE))" --host "$hosts" --mca plm_rsh_args "-F $keys/config" \
    --mca orte_keep_fqdn_hostnames 1 --mca odls_base_sigkill_timeout "$((drain_s + 10))" "${variables[@]}" "$(dirname "${BASH_SOURCE[0]}")/rank.sh" "$@"
